"""Count how handoffs end, per pair of nodes, and release offers that no node will load."""

from __future__ import annotations

import asyncio
import collections
import logging
import uuid
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import aiohttp

from ...connector.p2p.params import MOVE
from ..choice.ways import Offer
from ..http.sse import Event
from ..nodes.health import reason_of
from ..nodes.pool import UpstreamNode
from ..nodes.reading import NodeAnswer, read_whole
from .endings import objection_to
from .exchange import Begun, Exchange, Result, error_in, transfer_error

logger = logging.getLogger(__name__)

RESULTS: tuple[Result, ...] = get_args(Result)

#: The header with a decode node's report.
TRANSFER_HEADER = "X-KV-Transfer"
#: A node's error code for a request that failed after it was accepted. Without the header above it means a
#: failed load.
LOAD_FAILED = "generation_failed"

#: Bounds on requests to producers that do not answer. The lease ends an offer that we do not release.
MAX_RELEASES = 256
RELEASE_TIMEOUT_S = 5.0
#: Seconds that a stopping router waits for them.
LAST_RELEASES_S = 1.0

#: A server of vLLM that is told this count reports it in place of its own, even if its load has failed. The
#: router needs the server's own; see `bill`.
_PREFILLS_COUNT = "remote_prefill_cached_tokens"

NO_REASON = "the decode node gave no reason"
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


class Handoffs:
    """The results of all handoffs, and the releases in flight."""

    def __init__(self) -> None:
        self.pairs: dict[tuple[str, str], Pair] = collections.defaultdict(Pair)
        self._releases: set[asyncio.Task[Any]] = set()

    def opened(self, offer: Offer) -> None:
        """Count an offer that the router is to give to a decode node."""
        offer.node.num_offers += 1

    def settled(self, offer: Offer, decode: UpstreamNode | None, result: Result) -> None:
        """Count what became of an offer; of none that no decode node was asked to load."""
        offer.node.num_offers -= 1
        offer.node.end_watch_if_idle()
        if decode is not None:
            pair = self.pairs[offer.node.url, decode.url]
            pair.counts[result] += 1
            if result in ("loaded", "failed"):
                pair.is_failing = result == "failed"

    def explained(self, offer: Offer, decode: UpstreamNode, error: str) -> None:
        """Note why a load has failed."""
        pair = self.pairs.get((offer.node.url, decode.url))
        if pair is None:
            return  # the prefill node was removed meanwhile
        pair.last_error = error or NO_REASON
        if not pair.is_warned:
            pair.is_warned = True
            logger.warning(
                "handoffs from prefill node %s to decode node %s fail: %s; %s (/health and /metrics count them)",
                *(offer.node.url, decode.url, pair.last_error, REMEDY),
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

    def release(self, session: aiohttp.ClientSession, exchange: Exchange, offer: Offer) -> None:
        """Tell the producer in the background that no node will load the offer."""
        flags = {"do_remote_prefill": False, "do_remote_decode": False, "do_release": True}
        # The release needs an id of its own, because vLLM's nodes accept one request per id.
        request_id = f"release-{exchange.request_id}"
        self._begin(_told(session, exchange, offer.node, request_id, {**offer.params, **flags}))

    async def stop(
        self, session: aiohttp.ClientSession, exchange: Exchange, node: UpstreamNode, name: str
    ) -> None:
        """Ask a decode node to stop an answer after its next token, for another node to go on with.

        Its stream says whether it did.
        """
        await _told(session, exchange, node, f"move-{uuid.uuid4().hex}", {MOVE: name})

    def _begin(self, telling: Coroutine[Any, Any, None]) -> None:
        if len(self._releases) >= MAX_RELEASES:
            telling.close()
            return
        task = asyncio.create_task(telling)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def close(self) -> None:
        """Wait up to `LAST_RELEASES_S` for the releases in flight, then cancel them."""
        if self._releases:
            await asyncio.wait(self._releases, timeout=LAST_RELEASES_S)
        for release in self._releases:
            release.cancel()


async def _told(
    session: aiohttp.ClientSession,
    exchange: Exchange,
    node: UpstreamNode,
    request_id: str,
    params: Mapping[str, Any],
) -> None:
    """Send params to a node in an ordinary request, so that every node understands it."""
    body: dict[str, Any] = {"prompt": [0], "max_tokens": 1, "kv_transfer_params": params}
    if "model" in exchange.body:
        body["model"] = exchange.body["model"]
    headers = {**exchange.headers, "X-Request-Id": request_id}
    timeout = aiohttp.ClientTimeout(total=RELEASE_TIMEOUT_S)
    try:
        url = f"{node.url}/v1/completions"
        async with session.post(url, json=body, headers=headers, timeout=timeout) as response:
            logger.debug("%s: %s answered %s: %d", exchange.request_id, node.url, request_id, response.status)
            await read_whole(response.content)
    except (aiohttp.ClientError, TimeoutError, RuntimeError) as error:
        # The lease will end the offer. A RuntimeError means that the session was closed meanwhile.
        logger.debug("%s: cannot tell %s: %s", exchange.request_id, node.url, reason_of(error))


def params_of(answer: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `kv_transfer_params` of a whole answer. None if it has none."""
    params = answer.get("kv_transfer_params")
    if not isinstance(params, dict):
        return None
    return {key: value for key, value in params.items() if key != _PREFILLS_COUNT}


def begun_of(answer: NodeAnswer, **known: Any) -> Begun:
    """Read how a load has ended from the beginning of a decode node's answer.

    Args:
        known: What else `Begun` has.
    """
    body = _error_event(answer.events) if answer.is_stream else answer.content
    is_whole = answer.status == 200 and not answer.is_stream
    return Begun(
        *(answer.status, answer.headers, answer.is_stream, answer.payload, answer.events),
        *(_result(answer, body), error_in(body)),
        objection=objection_to(answer.payload, body) if is_whole else "",
        content=answer.content,
        **known,
    )


def _result(response: NodeAnswer, body: Mapping[str, Any]) -> Result:
    match response.headers.get(TRANSFER_HEADER):
        case "failed":
            return "failed"
        case "loaded":
            return "loaded"
        case "none":
            return "none"
    if transfer_error(body) or _code(body) == LOAD_FAILED:
        return "failed"
    return "unknown" if response.status == 200 and "error" not in body else "unanswered"


def _error_event(events: Iterable[Event]) -> Mapping[str, Any]:
    """Return the event that is an error; empty if there is none. vLLM answers 200 before a load has ended."""
    named = (event for event in events if b'"error"' in event.raw)  # parsing each event would take time
    return next((event.content for event in named if "error" in event.content), {})


def _code(body: Mapping[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("code", "")) if isinstance(error, dict) else ""
