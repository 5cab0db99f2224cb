"""The two stages of a request: its prompt at a prefill node, its answer at a decode node."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, NoReturn

import aiohttp
from aiohttp import web

from web.errors import ApiError, bad_request
from web.fields import Fields

from .nodes import Node

__all__ = [
    "NodeGoneError",
    "UpstreamAnswer",
    "check_body",
    "copy_answer",
    "decode_body",
    "gone_nodes",
    "open_answer",
    "open_prefill",
    "params_of",
    "prefill_body",
]

#: What a prefill node is asked for. vLLM's nodes want the other keys to be there.
DO_REMOTE_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
#: In `kv_transfer_params`: offer the prompt while it is computed. A key of ours; nodes that do not know it ignore it.
OVERLAP = "overlap"


#: What is about the answer. Of several answers each would be offered, and only one be loaded. A decode node that gives
#: one answer only, as those of this engine, says so after the prefill, and lets go of the offer.
_ONLY_FOR_DECODE = frozenset({"stream_options", "min_tokens", "n", "best_of"})


class NodeGoneError(Exception):
    """A node did not do its stage; another one may. Nothing of it reached the client."""


def check_body(body: Mapping[str, Any]) -> None:
    """Check what the prefill node will not see: a request that the decode node refuses would leave an offer behind.

    Raises:
        ApiError: a field is wrong (400).
    """
    fields = Fields(body)
    for name in ("max_tokens", "max_completion_tokens", "n", "best_of"):
        if fields.integer(name, 1) < 1:
            raise bad_request(f"{name}={body[name]}: it must be at least 1", name)
    fields.boolean("stream", False)
    Fields(fields.mapping("stream_options")).boolean("include_usage", False)


def prefill_body(body: Mapping[str, Any], *, overlap: bool) -> dict[str, Any]:
    """The request as the prefill node gets it: one token of one answer, keep the blocks.

    Args:
        overlap: Ask for a stream that says what the decode node needs as soon as part of the prompt is computed.
    """
    result = {key: value for key, value in body.items() if key not in _ONLY_FOR_DECODE}
    wish = {**DO_REMOTE_DECODE, OVERLAP: True} if overlap else dict(DO_REMOTE_DECODE)
    result |= {"max_tokens": 1, "stream": overlap, "kv_transfer_params": wish}
    if "max_completion_tokens" in result:
        result["max_completion_tokens"] = 1
    return result


def decode_body(body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any] | None) -> dict[str, Any]:
    """The request as the decode node gets it: the client's, with what the prefill node said."""
    result = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    return {**result, "kv_transfer_params": kv_transfer_params} if kv_transfer_params else result


@contextlib.asynccontextmanager
async def open_prefill(
    session: aiohttp.ClientSession, node: Node, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Have a prompt computed; leaving the block early aborts it there.

    Yields:
        The response of a node that accepted the request.

    Raises:
        NodeGoneError: another node may do it.
        UpstreamAnswer: the node refused the request: the client's answer.
    """
    with contextlib.ExitStack() as until_accepted:
        until_accepted.enter_context(gone_nodes(node))
        async with session.post(node.url + path, json=body, headers=headers) as response:
            if response.status != 200:
                _raise_refusal(node, response.status, await response.read())
            until_accepted.close()
            yield response


def _raise_refusal(node: Node, status: int, payload: bytes) -> NoReturn:
    if 400 <= status < 500:
        raise UpstreamAnswer(status, payload)
    raise NodeGoneError(f"{node.url} answered {status}: {payload[:200].decode(errors='replace')}")


def params_of(payload: bytes) -> Mapping[str, Any] | None:
    """The `kv_transfer_params` of a whole answer, None when it offers nothing."""
    try:
        params = json.loads(payload)["kv_transfer_params"]
    except (ValueError, KeyError, TypeError):
        return None
    return params if isinstance(params, dict) else None


class UpstreamAnswer(ApiError):
    """What a node answered instead of doing its stage, to be handed on as it is."""

    def __init__(self, status: int, payload: bytes) -> None:
        super().__init__(status, payload[:200].decode(errors="replace"), kind="upstream")
        self._payload = payload

    def response(self) -> web.Response:
        return web.Response(body=self._payload, status=self.status, content_type="application/json")


@contextlib.asynccontextmanager
async def open_answer(
    session: aiohttp.ClientSession, node: Node, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
) -> AsyncIterator[tuple[aiohttp.ClientResponse, bytes]]:
    """Ask a decode node for the answer; leaving the block early aborts it there.

    Yields:
        The response, and its first bytes; all of them when it is not a stream.

    Raises:
        NodeGoneError: no byte of the answer came.
    """
    with contextlib.ExitStack() as until_first_byte:
        until_first_byte.enter_context(gone_nodes(node))
        async with session.post(node.url + path, json=body, headers=headers) as response:
            is_stream = response.content_type == "text/event-stream"
            first = await (response.content.readany() if is_stream else response.read())
            if response.status in (502, 503):
                node.mark_down(f"it answered {response.status}")
                raise NodeGoneError(f"{node.url} answered {response.status}")
            until_first_byte.close()
            yield response, first


async def copy_answer(
    upstream: aiohttp.ClientResponse, first: bytes, request: web.Request
) -> web.StreamResponse:
    """Hand a node's answer to the client as it comes."""
    headers = {"Content-Type": upstream.headers.get("Content-Type", "application/json")}
    if "X-Request-Id" in upstream.headers:
        headers["X-Request-Id"] = upstream.headers["X-Request-Id"]
    if upstream.content_type != "text/event-stream":
        return web.Response(body=first, status=upstream.status, headers=headers)
    response = web.StreamResponse(status=upstream.status, headers={**headers, "Cache-Control": "no-cache"})
    await response.prepare(request)
    await response.write(first)
    try:
        async for chunk in upstream.content.iter_any():
            await response.write(chunk)
    except (aiohttp.ClientError, TimeoutError) as error:
        lost = ApiError(502, f"the decode node was lost in the middle: {_reason(error)}", kind="server_error")
        await response.write(b"\n\ndata: " + json.dumps(lost.body()).encode() + b"\n\ndata: [DONE]\n\n")
    await response.write_eof()
    return response


@contextlib.contextmanager
def gone_nodes(node: Node) -> Iterator[None]:
    """Turn what a lost connection raises into `NodeGoneError`, and remember the node as down."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError) as error:
        node.mark_down(_reason(error))
        raise NodeGoneError(f"{node.url}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
