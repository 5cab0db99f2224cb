"""Count how handoffs end, per pair of nodes, and release offers that no node will load."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import aiohttp

from ..web.json_body import object_of
from ..web.sse import Event
from .health import reason_of
from .nodes import UpstreamNode
from .phases import Call, Offer, params_of
from .reading import NodeAnswer, read_whole

logger = logging.getLogger(__name__)

#: The result of an offer. The decode node reports `loaded`, `failed` or `none` (there was nothing to load). `unknown`: it
#: answered without such a report. `unanswered`: it was lost, it refused the request, or the client left first.
Result = Literal["loaded", "failed", "none", "unknown", "unanswered"]
RESULTS: tuple[Result, ...] = get_args(Result)

#: The header with a decode node's report.
TRANSFER_HEADER = "X-KV-Transfer"
#: A node's error code for a request that failed after it was accepted. Without the header above it means a failed load.
LOAD_FAILED = "generation_failed"

#: Called with the params of an answer's offer.
NoteParams = Callable[[Mapping[str, Any]], object]

#: Bounds on requests to producers that do not answer. The lease ends an offer that we do not release.
MAX_RELEASES = 256
RELEASE_TIMEOUT_S = 5.0
#: Seconds that a stopping router waits for them.
LAST_RELEASES_S = 1.0

REMEDY = "start both with the same --connector, or with 'auto'"


@dataclass
class Pair:
    """The handoffs from one prefill node to one decode node.

    Attributes:
        last_error: Why the last failed handoff failed.
        is_failing: The last handoff whose result is known failed.
        is_warned: The log has a warning about this pair.
    """

    counts: collections.Counter[Result] = field(default_factory=collections.Counter)
    last_error: str = ""
    is_failing: bool = False
    is_warned: bool = False


class Handoff:
    """The handoff of one request.

    Attributes:
        offer: The prefill node's offer. None if it made none; then nothing is counted.
        decode_url: The decode node that received the offer. Empty if none has.
        result: How the handoff ended. None while it is open.
        error: Why it failed, if that is known.
    """

    def __init__(self, offer: Offer | None) -> None:
        self.offer = offer
        self.decode_url = ""
        self.result: Result | None = None
        self.error = ""

    def read_tail(self, tail: Iterable[Event]) -> None:
        """Look for the reason of a failure in the last events of a stream."""
        for event in reversed(list(tail)):
            self.error = self.error or _error_in(event.content)


class Handoffs:
    """The results of all handoffs, and the releases in flight."""

    def __init__(self) -> None:
        self.pairs: dict[tuple[str, str], Pair] = collections.defaultdict(Pair)
        self._releases: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def following(self, call: Call, offer: Offer | None) -> Iterator[Handoff]:
        """Follow one offer inside the block. If the decode node has not answered when it ends, release the offer."""
        handoff = Handoff(offer)
        if offer is not None:
            offer.node.num_offers += 1
        try:
            yield handoff
        finally:
            if offer is not None:
                if handoff.result is None:
                    self._end(call, offer, handoff, "unanswered")
                if handoff.result == "failed":
                    self._explain(offer, handoff)

    def answered(self, call: Call, handoff: Handoff, answer: NodeAnswer) -> None:
        """Note the decode node's first answer, and release at once an offer that the node will not load."""
        if handoff.offer is None or handoff.result is not None:
            return
        handoff.offer.settle()
        body = error_event(answer.events) if answer.is_stream else object_of(answer.payload)
        handoff.error = _error_in(body)
        self._end(call, handoff.offer, handoff, _result(answer, body))

    def ended(self, call: Call, handoff: Handoff, tail: Iterable[Event]) -> None:
        """Note the end of a stream, and release an offer that the node has not loaded by what it says there.

        Args:
            tail: Its last events.
        """
        was_failed = bool(handoff.error)
        handoff.read_tail(tail)
        if handoff.offer is not None and handoff.result == "unknown" and handoff.error and not was_failed:
            # vLLM begins a chat's stream before it says that the load has failed. A release of what was loaded does nothing.
            handoff.offer.hang_up()
            self.release(call, handoff.offer)

    def _end(self, call: Call, offer: Offer, handoff: Handoff, result: Result) -> None:
        handoff.result = result
        offer.node.num_offers -= 1
        offer.node.end_watch_if_idle()
        if result in ("failed", "unanswered"):
            # End a prefill that still runs before the release, because a producer may treat the release of an unfinished offer as
            # an abort of its request.
            offer.hang_up()
            self.release(call, offer)
        elif result == "none" and offer.is_rendezvous:
            offer.hang_up()  # the decode node had the prompt, so nothing needs the rest of the prefill
        if handoff.decode_url:
            pair = self.pairs[offer.node.url, handoff.decode_url]
            pair.counts[result] += 1
            if result in ("loaded", "failed"):
                pair.is_failing = result == "failed"

    def _explain(self, offer: Offer, handoff: Handoff) -> None:
        pair = self.pairs.get((offer.node.url, handoff.decode_url))
        if pair is None:
            return  # the prefill node was removed meanwhile
        pair.last_error = handoff.error or "the decode node gave no reason"
        if not pair.is_warned:
            pair.is_warned = True
            logger.warning(
                "handoffs from prefill node %s to decode node %s fail: %s; %s (/health and /metrics count them)",
                *(offer.node.url, handoff.decode_url, pair.last_error, REMEDY),
            )

    def problems(self) -> Iterator[str]:
        """Yield one line per pair whose last handoff failed."""
        for (prefill, decode), pair in self.pairs.items():
            if pair.is_failing:
                num_failed, num_all = pair.counts["failed"], pair.counts.total()
                yield (
                    f"{num_failed} of {num_all} handoffs from {prefill} to {decode} failed: "
                    f"{pair.last_error or 'the reason is not known yet'}; {REMEDY}"
                )

    def report(self) -> list[dict[str, Any]]:
        """Return the pairs as JSON."""
        return [
            {
                "prefill": prefill,
                "decode": decode,
                **{result: pair.counts[result] for result in RESULTS},
                "last_error": pair.last_error,
            }
            for (prefill, decode), pair in self.pairs.items()
        ]

    def forget(self, url: str) -> None:
        """Drop the results of all pairs with a node that no longer exists."""
        for pair in [pair for pair in self.pairs if url in pair]:
            del self.pairs[pair]

    # -- releases --------------------------------------------------------------------------------------

    def release(self, call: Call, offer: Offer) -> None:
        """Tell the producer in the background that no node will load the offer."""
        if len(self._releases) < MAX_RELEASES:
            release = asyncio.create_task(_released(call, offer))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)

    def ask(self, call: Call, node: UpstreamNode, note: NoteParams) -> asyncio.Task[None] | None:
        """Ask a decode node in the background for the offer of an answer that it has just streamed.

        Returns:
            None if too many such questions are in flight.
        """
        if len(self._releases) >= MAX_RELEASES:
            return None
        question = asyncio.create_task(_asked(call, node, note))
        self._releases.add(question)
        question.add_done_callback(self._releases.discard)
        return question

    async def close(self) -> None:
        """Wait up to `LAST_RELEASES_S` for the releases in flight, then cancel them."""
        if self._releases:
            await asyncio.wait(self._releases, timeout=LAST_RELEASES_S)
        for release in self._releases:
            release.cancel()


async def _released(call: Call, offer: Offer) -> None:
    flags = {"do_remote_prefill": False, "do_remote_decode": False, "do_release": True}
    body = {"prompt": [0], "max_tokens": 1, "kv_transfer_params": {**offer.params, **flags}}
    if "model" in call.body:
        body["model"] = call.body["model"]
    # The release needs an id of its own, because vLLM's nodes accept one request per id.
    headers = {**call.headers, "X-Request-Id": f"release-{call.request_id}"}
    timeout = aiohttp.ClientTimeout(total=RELEASE_TIMEOUT_S)
    try:
        url = f"{offer.node.url}/v1/completions"
        async with call.session.post(url, json=body, headers=headers, timeout=timeout) as response:
            await read_whole(response)
            logger.debug(
                "%s: %s answered the release of its offer: %d",
                call.request_id,
                offer.node.url,
                response.status,
            )
    except (aiohttp.ClientError, TimeoutError, RuntimeError) as error:
        # The lease will end the offer. A RuntimeError means that the session was closed meanwhile.
        logger.debug(
            "%s: cannot release the offer at %s: %s", call.request_id, offer.node.url, reason_of(error)
        )


async def _asked(call: Call, node: UpstreamNode, note: NoteParams) -> None:
    body: dict[str, Any] = {
        "prompt": [0],
        "max_tokens": 1,
        "kv_transfer_params": {"answer_of": call.request_id},
    }
    if "model" in call.body:
        body["model"] = call.body["model"]
    headers = {**call.headers, "X-Request-Id": f"question-{uuid.uuid4().hex}"}
    timeout = aiohttp.ClientTimeout(total=RELEASE_TIMEOUT_S)
    try:
        url = f"{node.url}/v1/completions"
        async with call.session.post(url, json=body, headers=headers, timeout=timeout) as response:
            params = params_of(object_of(await read_whole(response)))
    except (aiohttp.ClientError, TimeoutError, RuntimeError) as error:
        logger.debug("%s: cannot ask %s for its answer: %s", call.request_id, node.url, reason_of(error))
        return
    if params is not None and "answer_lease_s" in params:
        note(params)


def has_loaded(response: NodeAnswer) -> bool:
    """Return whether a decode node reports that it loaded a KV cache."""
    return response.headers.get(TRANSFER_HEADER) == "loaded"


def _result(response: NodeAnswer, body: Mapping[str, Any]) -> Result:
    match response.headers.get(TRANSFER_HEADER):
        case "failed":
            return "failed"
        case "loaded":
            return "loaded"
        case "none":
            return "none"
    if _transfer_error(body) or _code(body) == LOAD_FAILED:
        return "failed"
    return "unknown" if response.status == 200 and "error" not in body else "unanswered"


def error_event(events: Iterable[Event]) -> Mapping[str, Any]:
    """Return the event that is an error; empty if there is none. vLLM answers 200 before a load has ended."""
    named = (event for event in events if b'"error"' in event.raw)  # parsing each event would take time
    return next((event.content for event in named if "error" in event.content), {})


def _error_in(body: Mapping[str, Any]) -> str:
    """Return why a load failed, from an answer or one event of it. Empty if it does not say."""
    error = body.get("error")
    message = str(error.get("message", "")) if isinstance(error, dict) else ""
    return _transfer_error(body) or message


def _transfer_error(body: Mapping[str, Any]) -> str:
    metrics = body.get("metrics")
    transfer = metrics.get("transfer") if isinstance(metrics, dict) else None
    return str(transfer.get("error") or "") if isinstance(transfer, dict) else ""


def _code(body: Mapping[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("code", "")) if isinstance(error, dict) else ""
