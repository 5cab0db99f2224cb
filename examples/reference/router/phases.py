"""The two phases of a request: prefill at one node, decode at another."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import aiohttp
from aiohttp import web

from ..web.errors import ApiError, bad_request
from ..web.fields import Fields
from .nodes import NodeGoneError, UpstreamNode

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


@dataclass(frozen=True)
class Call:
    """A client's request on its way to the nodes."""

    session: aiohttp.ClientSession
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]

    @property
    def request_id(self) -> str:
        return self.headers["X-Request-Id"]


@dataclass(frozen=True)
class Offer:
    """What a prefill node keeps for a decode node.

    Attributes:
        params: The `kv_transfer_params` that it answered with.
        hang_up: Ends the prefill if it is still under way.
    """

    node: UpstreamNode
    params: Mapping[str, Any]
    hang_up: Callable[[], object] = lambda: None


def check_body(body: Mapping[str, Any]) -> None:
    """Check what the prefill node will not see: a request that the decode node refuses would leave an offer behind.

    Raises:
        ApiError: a field is wrong (400).
    """
    fields = Fields(body)
    for name in ("max_tokens", "max_completion_tokens", "n", "best_of"):
        if fields.integer(name, 1) < 1:
            raise bad_request(f"{name}={body[name]}: it must be at least 1", name)
    for name in ("prompt", "prompt_embeds"):
        _refuse_several(name, body.get(name))
    fields.boolean("stream", False)
    Fields(fields.mapping("stream_options")).boolean("include_usage", False)


def _refuse_several(name: str, value: object) -> None:
    """One offer is for one prompt, so a request with several has nothing that its decode could be given."""
    if isinstance(value, list) and len(value) > 1 and any(isinstance(item, str | list) for item in value):
        message = (
            f"{name!r} has {len(value)} prompts: each needs a handoff of its own; send one request per prompt"
        )
        raise bad_request(message, name)


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
    call: Call, node: UpstreamNode, body: Mapping[str, Any]
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Have a prompt computed; leaving the block early aborts it there.

    Yields:
        The response of a node that accepted the request.

    Raises:
        NodeGoneError: another node may do it.
        UpstreamAnswer: the node refused the request: the client's answer.
    """
    async with contextlib.AsyncExitStack() as stack:
        async with node.exchange():
            posted = call.session.post(node.url + call.path, json=body, headers=call.headers)
            response = await stack.enter_async_context(posted)
            if response.status != 200:
                _raise_refusal(node, response.status, await response.read())
        yield response


def _raise_refusal(node: UpstreamNode, status: int, payload: bytes) -> NoReturn:
    if 400 <= status < 500:
        raise UpstreamAnswer(status, payload)
    raise _failed(node, status, payload)


def _failed(node: UpstreamNode, status: int, payload: bytes) -> NodeGoneError:
    if status in (502, 503):
        node.suspect()  # it may be draining, or its engine dead: its `/health` says
    return NodeGoneError(node, f"answered {status}: {payload[:200].decode(errors='replace')}")


def params_of(payload: bytes) -> Mapping[str, Any] | None:
    """The `kv_transfer_params` of a whole answer, None when it offers nothing."""
    params = object_of(payload).get("kv_transfer_params")
    return params if isinstance(params, dict) else None


def object_of(payload: bytes) -> Mapping[str, Any]:
    """Read a JSON object, or nothing if it is none."""
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class UpstreamAnswer(ApiError):
    """What a node answered instead of doing its stage, to be handed on as it is."""

    def __init__(self, status: int, payload: bytes) -> None:
        super().__init__(status, payload[:200].decode(errors="replace"), kind="upstream")
        self._payload = payload

    def response(self) -> web.Response:
        return web.Response(body=self._payload, status=self.status, content_type="application/json")


@contextlib.asynccontextmanager
async def open_answer(
    call: Call, node: UpstreamNode, body: Mapping[str, Any]
) -> AsyncIterator[tuple[aiohttp.ClientResponse, bytes]]:
    """Ask a decode node for the answer; leaving the block early aborts it there.

    Yields:
        The response, and its first bytes; all of them when it is not a stream.

    Raises:
        NodeGoneError: no byte of the answer came.
    """
    async with contextlib.AsyncExitStack() as stack:
        async with node.exchange():
            posted = call.session.post(node.url + call.path, json=body, headers=call.headers)
            response = await stack.enter_async_context(posted)
            first = await (response.content.readany() if is_stream(response) else response.read())
            if response.status in (502, 503):
                raise _failed(node, response.status, first)
        yield response, first


def is_stream(response: aiohttp.ClientResponse) -> bool:
    return response.content_type == "text/event-stream"
