"""The two phases of a request: prefill at one node, decode at another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import aiohttp
from aiohttp import web

from ..connector.p2p.params import REFUSED_TO_CONTINUE
from ..web.errors import ApiError, bad_request
from ..web.fields import Fields
from ..web.json_body import object_of
from ..web.tracing import NO_SPAN, Span, current_span
from .first_tokens import FirstToken
from .nodes import NodeGoneError, UpstreamNode
from .reading import NodeAnswer
from .sessions import Turn, no_turn
from .timelines import Timeline

#: The request to a prefill node to offer its cache. vLLM's nodes require the other keys.
DO_REMOTE_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

#: Fields that only say how the tokens of an answer are chosen, and what it shows of them. A prefill node whose token is not used
#: does not receive them: they cost it time, and some make it fail. This is a list of what to leave out, and not of what to keep,
#: because a prompt that lacked an unknown field could be another prompt, whose cache the decode node refuses. So these stay:
#: `tools`, `tool_choice`, `response_format` and all that a chat template may read, and `echo` and `prompt_logprobs`.
_ONLY_FOR_SAMPLING = frozenset(
    {
        *("seed", "temperature", "top_p", "top_k", "min_p", "typical_p", "use_beam_search", "length_penalty"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "repetition_detection"),
        *("logit_bias", "allowed_token_ids", "bad_words", "logits_processors", "ignore_eos"),
        *("stop", "stop_token_ids", "include_stop_str_in_output"),
        *("logprobs", "top_logprobs", "return_top_logits", "return_token_ids"),
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("guided_decoding_backend", "guided_whitespace_pattern"),
    }
)
#: With `echo`, these ask for log probabilities of the prompt.
_ABOUT_ECHO = frozenset({"logprobs", "top_logprobs", "return_token_ids"})
#: Fields about the answer. With `n` or `best_of` the prefill node would make one offer per answer, of which only one is loaded.
_ONLY_FOR_DECODE = frozenset({"stream_options", "min_tokens", "n", "best_of"})


@dataclass(frozen=True)
class Call:
    """A client's request on its way to the nodes.

    Attributes:
        queue: The span until a node is called for the first time.
        turn: Which conversation it continues.
        timeline: Records what becomes of it. The page shows it only if it comes from `RecentRequests`.
        may_meet: Both nodes may be asked at once. False after that has failed.
    """

    session: aiohttp.ClientSession
    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    queue: Span = NO_SPAN
    turn: Turn = field(default_factory=no_turn)
    timeline: Timeline = field(default_factory=Timeline)
    may_meet: bool = True

    @property
    def request_id(self) -> str:
        return self.headers["X-Request-Id"]


@dataclass(frozen=True)
class Offer:
    """The cache that a prefill node holds for a decode node.

    Attributes:
        params: The `kv_transfer_params` of the prefill node's answer; in a rendezvous, those that the router made.
        hang_up: Ends the prefill if it still runs.
        answered: In a rendezvous: the offer as the prefill node will answer it. None: this is it.
        settle: Called when the decode node has answered.
        first: The answer's first token, if the prefill node has sampled it for the client. Otherwise None.
        headers: Of the prefill node's answer.
    """

    node: UpstreamNode
    params: Mapping[str, Any]
    hang_up: Callable[[], object] = lambda: None
    answered: asyncio.Future[Offer] | None = None
    settle: Callable[[], object] = lambda: None
    first: FirstToken | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_rendezvous(self) -> bool:
        """Whether the prefill has only begun, so that only a decode node that claims by name can use it."""
        return self.answered is not None


def check_body(body: Mapping[str, Any]) -> None:
    """Check the fields that the prefill node does not receive.

    If only the decode node refused the request, the prefill would have been wasted.

    Raises:
        ApiError: A field is wrong (400).
    """
    fields = Fields(body)
    for name in ("max_tokens", "max_completion_tokens", "n", "best_of"):
        # An answer that is nothing but the echo of its prompt has no token of its own.
        least = 0 if name.startswith("max") and body.get("echo") is True else 1
        if fields.integer(name, least) < least:
            raise bad_request(f"{name}={body[name]}: it must be at least {least}", name)
    _refuse_several("prompt_embeds", body.get("prompt_embeds"))
    fields.boolean("stream", False)
    Fields(fields.mapping("stream_options")).boolean("include_usage", False)


def _refuse_several(name: str, value: object) -> None:
    """Refuse several prompts of a kind that the router cannot split."""
    if isinstance(value, list) and len(value) > 1 and any(isinstance(item, str | list) for item in value):
        message = (
            f"{name!r} has {len(value)} prompts: each needs a handoff of its own; send one request per prompt"
        )
        raise bad_request(message, name)


def prefill_body(
    body: Mapping[str, Any],
    *,
    wish: Mapping[str, Any] | None = None,
    answer: Mapping[str, Any] | None = None,
    is_token_used: bool = True,
) -> dict[str, Any]:
    """Return the body for the prefill node: compute one token of one answer, and keep the blocks.

    Args:
        wish: More keys of `kv_transfer_params`.
        answer: The `kv_transfer_params` of the conversation's latest answer. The node loads from it what it lacks.
        is_token_used: The token may become the answer's first one, so the node chooses it as the client wants it.
    """
    result = {key: value for key, value in body.items() if key not in _ONLY_FOR_DECODE}
    if not is_token_used:
        left_out = _ONLY_FOR_SAMPLING - (_ABOUT_ECHO if body.get("echo") else frozenset())
        # The likeliest token is the cheapest one.
        result = {key: value for key, value in result.items() if key not in left_out} | {"temperature": 0}
    params = {**DO_REMOTE_DECODE, **(wish or {})}
    if answer is not None:
        params |= {**answer, "do_remote_decode": True, "do_remote_prefill": True}
    result |= {"max_tokens": 1, "stream": False, "kv_transfer_params": params}
    if "max_completion_tokens" in result:
        result["max_completion_tokens"] = 1
    return result


def decode_body(body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the body for the decode node: the client's, with the prefill node's parameters."""
    result = {key: value for key, value in body.items() if key != "kv_transfer_params"}
    return {**result, "kv_transfer_params": kv_transfer_params} if kv_transfer_params else result


@contextlib.asynccontextmanager
async def open_prefill(call: Call, node: UpstreamNode, body: Mapping[str, Any]) -> AsyncIterator[NodeAnswer]:
    """Ask a prefill node to compute a prompt. Leaving the block early aborts the request.

    Yields:
        The whole answer of a node that accepted the request.

    Raises:
        NodeGoneError: The node failed; another one may succeed.
        UpstreamAnswer: The node refused the request. This is the client's answer.
    """
    async with contextlib.AsyncExitStack() as stack:
        span = stack.enter_context(_call_span("kvferry.prefill_call", call, node))
        async with node.exchange():
            call.timeline.prefill_sent(node.url)
            posted = call.session.post(node.url + call.path, **_traced(call, body, span))
            answer = NodeAnswer(await stack.enter_async_context(posted))
            await answer.begin()
            if answer.status != 200:
                _raise_refusal(node, answer.status, answer.payload)
            require_not_aborted(node, answer)
        yield answer


def _call_span(name: str, call: Call, node: UpstreamNode) -> Span:
    call.queue.end()
    return current_span().child(name, node=node.url)


def _traced(call: Call, body: Mapping[str, Any], span: Span) -> dict[str, Any]:
    """Return the body and headers of a call, with the context of its span in both.

    A node inside vLLM reads the headers only if vLLM traces, so the context is in `kv_transfer_params` as well.
    """
    if isinstance(params := body.get("kv_transfer_params"), Mapping):
        body = {**body, "kv_transfer_params": span.traced_params(params)}
    return {"json": body, "headers": {**call.headers, **span.headers}}


def _raise_refusal(node: UpstreamNode, status: int, payload: bytes) -> NoReturn:
    if 400 <= status < 500 and status != 429:
        raise UpstreamAnswer(status, payload)
    raise _failed(node, status, payload)


def _failed(node: UpstreamNode, status: int, payload: bytes) -> NodeGoneError:
    if status in (502, 503):
        node.suspect()  # it may be draining, or its engine may be dead; a health check will tell
    # A node that answers 429 is well, and has more requests than it may have. Another one may have fewer.
    reason = f"answered {status}: {payload[:200].decode(errors='replace')}"
    return NodeGoneError(node, reason, may_eject=status not in (429, 503))


def require_not_aborted(node: UpstreamNode, answer: NodeAnswer) -> None:
    """Check the beginning of an answer. A vLLM server that is stopping answers new requests 200 without a token, as aborted.

    Raises:
        NodeGoneError: The node aborted the request; another one may answer it.
    """
    if b'"abort"' not in answer.payload:
        return  # parsing each answer would take time
    if any(choice.get("finish_reason") == "abort" for choice in _choices(answer)):
        raise NodeGoneError(node, "aborted the request; is it stopping?", may_eject=False)


def _choices(answer: NodeAnswer) -> Iterator[Mapping[str, Any]]:
    for content in answer.contents():
        choices = content.get("choices")
        yield from (
            choice for choice in (choices if isinstance(choices, list) else ()) if isinstance(choice, dict)
        )


def params_of(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `kv_transfer_params` of a whole answer. None if it has none."""
    params = answer.get("kv_transfer_params")
    return params if isinstance(params, dict) else None


class UpstreamAnswer(ApiError):
    """A node's refusal, which is passed on to the client unchanged."""

    def __init__(self, status: int, payload: bytes) -> None:
        error = object_of(payload).get("error")
        message = str(error["message"]) if isinstance(error, dict) and "message" in error else ""
        super().__init__(status, message or payload[:200].decode(errors="replace"), kind="upstream")
        self._payload = payload

    def response(self) -> web.Response:
        return web.Response(body=self._payload, status=self.status, content_type="application/json")


@contextlib.asynccontextmanager
async def open_answer(call: Call, node: UpstreamNode, body: Mapping[str, Any]) -> AsyncIterator[NodeAnswer]:
    """Ask a decode node for the answer. Leaving the block early aborts the request.

    Yields:
        The answer, whole or with its first event.

    Raises:
        NodeGoneError: No byte of the answer arrived, or the node aborted it.
    """
    async with contextlib.AsyncExitStack() as stack:
        span = stack.enter_context(_call_span("kvferry.decode_call", call, node))
        async with node.exchange():
            posted = call.session.post(node.url + call.path, **_traced(call, body, span))
            answer = NodeAnswer(await stack.enter_async_context(posted))
            await answer.begin()
            if answer.status in (429, 502, 503):
                raise _failed(node, answer.status, answer.payload)
            require_not_aborted(node, answer)
            _require_continued(node, answer)
        yield answer


def _require_continued(node: UpstreamNode, answer: NodeAnswer) -> None:
    """Check that a server of vLLM has not refused to continue an answer.

    Raises:
        NodeGoneError: It has, because it is another model than the router knew. Another node may continue.
    """
    if REFUSED_TO_CONTINUE.encode() not in answer.payload:
        return
    for choice in _choices(answer):
        reason = choice.get("stop_reason")
        if isinstance(reason, str) and reason.startswith(REFUSED_TO_CONTINUE):
            node.doubt_identity()
            raise NodeGoneError(node, reason, may_eject=False)
