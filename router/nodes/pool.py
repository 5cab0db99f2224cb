"""The nodes of a role: which there are, how each of them is, and which one gets the next request.

Checks decide whether a node is ready, draining or gone. If a request's connection breaks, the node is checked
at once. Requests that fail in a row let a node be avoided whose checks succeed. `states` has the rules,
`membership` those about sources, and `placement` the choice between the nodes of both roles.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import aiohttp

from ...connector.p2p.params import DEFAULT_MAX_TOKENS, KV_EVENTS, MOST_TOKENS
from ..http.errors import ApiError, bad_request
from .health import Prober, is_local, reason_of
from .membership import OPTION, ROLES, Contributions, Role, server_name_of
from .states import (
    FAILED_CHECKS_UNTIL_GONE,
    USABLE,
    Abilities,
    EjectionRule,
    Health,
    NodeState,
    NodeStatus,
    Occupancy,
)

logger = logging.getLogger(__name__)

#: The next check follows a failed one within this time.
RECHECK_S = 1.0
#: How long a client's error waits for the result of a fresh check.
CAUSE_WAIT_S = 2.0
#: By then a restarted node, or another one, may take the request.
RETRY_AFTER_S = 2
#: Fields in which two nodes may differ that hand over.
_NOT_OF_A_CACHE = frozenset(
    {
        *("tokenizer", "chat_template", "sampling", "logits_processors", "stop_tokens"),
        *(DEFAULT_MAX_TOKENS, MOST_TOKENS),
    }
)
#: Of what a client wrote, in a message.
MAX_SHOWN_CHARS = 80
#: The role of a node that cannot do what nodes of a pool are for. The others fit, `kv_both` among them.
_CONTRARY_ROLES: Mapping[Role, str] = {"prefill": "kv_consumer", "decode": "kv_producer"}


class NodeGoneError(Exception):
    """A node failed in its phase; another node may succeed. The message names the node and the reason.

    Attributes:
        reason: Why, without the node's name.
        is_explained: The reason comes from a health check; otherwise from the request itself.
        may_eject: The failure counts towards the node being avoided. False if the node only takes no request
            now, for example because it drains, or if the router itself failed.
        is_lost: The connection broke, or the engine ended, while the node had the request. The request may be
            why.
    """

    def __init__(
        self,
        node: UpstreamNode,
        reason: str,
        *,
        is_explained: bool = False,
        may_eject: bool = True,
        is_lost: bool = False,
    ) -> None:
        super().__init__(f"{node.url}: {reason}")
        self.node = node
        self.reason = reason
        self.is_explained = is_explained
        self.may_eject = may_eject
        self.is_lost = is_lost

    async def explained(self) -> str:
        """Return the message, with the result of a fresh health check. Takes up to `CAUSE_WAIT_S`."""
        if not self.is_explained:
            await self.node.await_check(CAUSE_WAIT_S)
            if self.node.last_error:
                return f"{self}; {self.node.last_error}"
        return str(self)


class NoNodeError(ApiError):
    """No node of a role can take a request (503)."""

    def __init__(self, message: str, *, retry_after_s: int | None = RETRY_AFTER_S) -> None:
        super().__init__(
            503,
            message,
            kind="service_unavailable_error",
            code="unavailable",
            retry_after_s=retry_after_s,
        )


class UpstreamNode:
    """One node as the router sees it.

    Attributes:
        in_flight: The router's requests at the node.
        occupancy: The load that the node reported at the last check. None if it reported none.
        num_at_once: Prefills in flight whose decode node was asked at the same time.
        num_offers: Offers of the node that the router has given, or is about to give, to a decode node that
            has not answered.
        said: What the node has said of itself last: its role, models, policy, and whose answers it goes on
            with; see `Health`. Its description is empty after its process was gone.
        place: Where a decode node can claim from this one: what its connector has said of itself, or the
            `kv_transfer_params` of its last answer. Empty before the first of them, and after its process was
            gone.
        num_ends: Changes whenever the node's process has ended. What was asked of it before may be asked of
            it again.
        on_ended: Called with the URL when the node's process has ended.
        on_occupancy: Called with the URL and the load that the node reported.
        leaves: Set while the node drains, or no source names it: its answers should go on elsewhere.
    """

    def __init__(self, role: Role, url: str, ejection: EjectionRule | None = None) -> None:
        self.role = role
        self.url = url.rstrip("/")
        self.in_flight = 0
        self.occupancy: Occupancy | None = None
        self.num_connection_failures = 0
        self.num_at_once = 0
        self.num_offers = 0
        self.num_ends = 0
        self.last_used = 0
        self.said = Health(NodeState.UNKNOWN)
        self.place: Mapping[str, Any] = {}
        self.on_ended: Callable[[str], None] = lambda url: None
        self.on_occupancy: Callable[[str, Occupancy], None] = lambda url, occupancy: None
        self.leaves = asyncio.Event()
        self._status = NodeStatus(ejection)
        self._prober = Prober(self.url)
        self._exchanges: set[asyncio.Timeout] = set()
        self._why_ended = ""
        self._waiting: list[asyncio.Future[None]] = []
        self._check_is_wanted = asyncio.Event()

    @property
    def state(self) -> NodeState:
        return self._status.state

    @property
    def last_error(self) -> str:
        """Why the last check failed. Empty if it succeeded."""
        return self._status.check_error

    @property
    def why(self) -> str:
        """Why the node is not ready, or is avoided. Empty if all is well."""
        return self._status.why

    @property
    def num_ejections(self) -> int:
        return self._status.num_ejections

    @property
    def protocol(self) -> int:
        """The newest version of kvferry's handoff protocol that the node speaks. 0 if it does not say."""
        return self._prober.protocol

    @property
    def kv_events(self) -> Mapping[str, Any]:
        """Where the node publishes what its prefix cache stores and removes, in its own words. Empty if it
        does not.
        """
        said = self.said.description.get(KV_EVENTS)
        return said if isinstance(said, dict) else {}

    def note_params(self, params: Mapping[str, Any] | None) -> None:
        """Note the `kv_transfer_params` of an answer. Without the block ids, which are many."""
        self.place = {key: value for key, value in (params or {}).items() if key != "remote_block_ids"}

    @property
    def abilities(self) -> Abilities:
        """What the node can do with the beginning of an answer."""
        prober = self._prober
        default, most = (_count_in(prober.fields, name) for name in (DEFAULT_MAX_TOKENS, MOST_TOKENS))
        return Abilities(
            self.said.continues_answers, prober.vllm_max_model_len, prober.vllm_models, default, most
        )

    def serves(self, model: object) -> bool:
        """Whether the node can answer a request for this model, as far as it is known.

        None is the node's own model.
        """
        models = self.said.models
        return not isinstance(model, str) or not model or not models or model in models

    def difference_to(self, producer: UpstreamNode) -> str:
        """Say why no cache can be handed over from another node to this one, by what both have said; empty if
        it can.
        """
        ours, theirs = self._prober.fields, producer._prober.fields
        compared = (ours.keys() | theirs.keys()) - _NOT_OF_A_CACHE if ours and theirs else set()
        if not (differing := sorted(key for key in compared if ours.get(key) != theirs.get(key))):
            return ""
        return (
            f"the prompt's cache cannot be handed over from {producer.url} to {self.url}: these nodes differ in "
            f"{', '.join(differing)}; start both with the same model and the same version of vLLM"
        )

    def doubt_identity(self) -> None:
        """Let the node go on with no answer of another one until a check has found out again what it is."""
        self.said = replace(self.said, continues_answers="")
        self._prober.forget()
        self._check_is_wanted.set()

    @property
    def is_idle(self) -> bool:
        """Whether the router has nothing under way at the node."""
        return self.in_flight == 0 and self.num_offers == 0

    @property
    def trouble(self) -> int:
        """How bad the node is to choose, of those that are usable; 0 if it is well."""
        return self._status.trouble(time.monotonic(), self.in_flight)

    def report(self) -> dict[str, Any]:
        """Return the router's view of the node as JSON."""
        probe = self._prober.last
        return {
            "url": self.url,
            "role": self.role,
            "kv_role": self.said.kv_role or None,
            "models": sorted(self.said.models) or None,
            "state": self.state.value,
            "why": self.why,
            "in_flight": self.in_flight,
            "load": None
            if (load := self.occupancy) is None
            else {
                "running": load.num_running,
                "waiting": load.num_waiting,
                "pool_usage": round(load.pool_usage, 3),
            },
            "offers": self.num_offers,
            "ejections": self.num_ejections,
            "version": self._prober.version or None,
            "last_probe": None
            if probe is None
            else {
                "path": probe.path,
                "at": round(probe.at, 3),
                "seconds": round(probe.took_s, 6),
                "error": probe.error,
            },
        }

    def note(self, health: Health) -> None:
        """Apply the result of a check."""
        if health.is_local and health.error != self.last_error:
            logger.error("the router cannot check %s node %s: %s", self.role, self.url, health.error)
        if NodeState.GONE in (self.state, health.state):
            # The next process at this address has another epoch. Also when the node is back, because a late
            # answer of the old process may have come meanwhile.
            self.place, self.said = {}, replace(self.said, description={})
            self.num_ends += 1
            self.on_ended(self.url)
        if health.state in (NodeState.READY, NodeState.OVERLOADED):
            self.said = replace(self.said, kv_role=health.kv_role)
            if health.kv_role == _CONTRARY_ROLES[self.role]:
                other = next(role for role in ROLES if role != self.role)
                error = f"its own kv_role is {health.kv_role!r}: name it as a {other} node, or start it with another role"
                health = Health(NodeState.REFUSED, error, models=health.models)
        with self._changing():
            self._status.checked(health)
        if health.state is NodeState.READY:
            self.place = health.description or self.place
            # A check that describes nothing does not take back what an earlier one did: only an end does.
            self.said = replace(health, description=health.description or self.said.description)
        elif health.state is NodeState.REFUSED:
            self.said = replace(self.said, models=health.models)
        is_over = self._status.num_failed_checks >= FAILED_CHECKS_UNTIL_GONE
        if health.ends_requests and (health.state is NodeState.GONE or is_over):
            # Do this at each such check, not only at the first: at the first one a request may have been
            # writing to its client rather than waiting for the node.
            self.end_exchanges()

    def note_occupancy(self, occupancy: Occupancy | None) -> None:
        """Note the load that the node reported."""
        self.occupancy = occupancy
        if occupancy is not None:
            self.on_occupancy(self.url, occupancy)

    def note_answered(self) -> None:
        """Note a request that the node answered to its end."""
        self._status.request_answered()

    def note_failed(self, error: NodeGoneError) -> None:
        """Note a request that the node failed. The next ones may avoid it for that."""
        if error.is_explained or not error.may_eject:
            return  # a check has found the node gone, or will find out what it is doing
        if self._status.request_failed(error.reason, time.monotonic()):
            logger.warning("%s node %s is avoided: %s", self.role, self.url, self.why)

    def drop(self) -> None:
        """Give the node no new request. `watch` returns once those that it has have ended."""
        with self._changing():
            self._status.drop()
        self._check_is_wanted.set()

    def name_again(self) -> None:
        """Use the node again after a `drop`, as soon as a check finds it ready."""
        with self._changing():
            self._status.name_again()
        self._check_is_wanted.set()

    def end_watch_if_idle(self) -> None:
        """End `watch` if the node was dropped and nothing is under way at it any more."""
        if self.state is NodeState.LEAVING and self.is_idle:
            self._check_is_wanted.set()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Log the change of state that happens inside the block, if any."""
        before = self.state
        yield
        if self.state is before:
            return
        if self.state in (NodeState.DRAINING, NodeState.LEAVING):
            self.leaves.set()
        else:
            self.leaves.clear()
        if {before, self.state} == {NodeState.READY, NodeState.OVERLOADED}:
            # Under load this happens every second.
            logger.debug("%s node %s is %s", self.role, self.url, self.state.value)
            return
        is_gone = self.state is NodeState.GONE
        # A node that starts together with the router is no loss, and neither is one that announced its end.
        is_loss = is_gone and before not in (NodeState.DRAINING, NodeState.UNKNOWN)
        what = "not ready yet" if is_gone and before is NodeState.UNKNOWN else self.state.value
        why = f": {self.why}" if self.why else ""
        is_bad = is_loss or self.state is NodeState.REFUSED
        level = logging.WARNING if is_bad else logging.INFO
        logger.log(level, "%s node %s is %s%s", self.role, self.url, what, why)

    def suspect(self) -> None:
        """Request a check now, because a request failed in a way that suggests that the node is gone."""
        self._status.suspect()
        self._check_is_wanted.set()

    def stop(self, why: str) -> None:
        """End every exchange in flight, and give `why` as the reason."""
        self._status.check_error = why
        self.end_exchanges()

    def exchange(self) -> _Exchange:
        """Wait for the node inside the block until health checks find it gone. There is no other limit.

        Raises:
            NodeGoneError: The connection broke, or health checks found the node gone.
        """
        return _Exchange(self)

    def _broke(self, error: Exception) -> NodeGoneError:
        """Take in that a connection broke."""
        self.num_connection_failures += 1
        self.doubt_identity()  # another process may be at this address by now
        self.suspect()
        reason, may_eject = reason_of(error), not is_local(error)
        return NodeGoneError(self, reason, may_eject=may_eject, is_lost=_had_request(error))

    def end_exchanges(self) -> None:
        """End every exchange in flight with `last_error`."""
        # A check may succeed before the exchanges are awake.
        self._why_ended = self.last_error
        exchanges, self._exchanges = self._exchanges, set()
        now = asyncio.get_running_loop().time()
        for limit in exchanges:
            limit.reschedule(now)

    async def await_check(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` for the end of a check that begins after this call."""
        ended = asyncio.get_running_loop().create_future()
        self._waiting.append(ended)
        self._check_is_wanted.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await ended

    async def watch(self, session: aiohttp.ClientSession, interval_s: float, timeout_s: float) -> None:
        """Check the node again and again, and at once when a check is requested.

        Returns once it was dropped and is idle.
        """
        try:
            await self._watch(session, interval_s, timeout_s)
        finally:
            self._prober.close()

    async def _watch(self, session: aiohttp.ClientSession, interval_s: float, timeout_s: float) -> None:
        while not (self.state is NodeState.LEAVING and self.is_idle):
            self._check_is_wanted.clear()
            waiting, self._waiting = self._waiting, []
            try:
                health = await self._prober.probe(session, timeout_s)
                if health.state is NodeState.READY:
                    health = await self._prober.completed(session, timeout_s, health)
                self.note(health)
                self.note_occupancy(health.occupancy)
            except Exception:
                # These checks are the only deadline of requests at this node, so a bug of ours must not end
                # them.
                logger.exception("checking %s node %s failed", self.role, self.url)
                self.note(
                    Health(None, "the health check failed by a bug of the router; its log has the traceback")
                )
            for ended in waiting:
                if not ended.done():
                    ended.set_result(None)
            is_in_doubt = 0 < self._status.num_failed_checks < FAILED_CHECKS_UNTIL_GONE
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(interval_s, RECHECK_S) if is_in_doubt else interval_s):
                    await self._check_is_wanted.wait()


#: The nodes tried for one request, each with its error. None: no error so far.
Tried = dict[UpstreamNode, NodeGoneError | None]


class _Exchange:
    """See `UpstreamNode.exchange`. A generator in its place would take a twentieth of a request's time."""

    __slots__ = ("_limit", "_node")

    def __init__(self, node: UpstreamNode) -> None:
        self._node, self._limit = node, asyncio.timeout(None)

    async def __aenter__(self) -> None:
        await self._limit.__aenter__()
        self._node._exchanges.add(self._limit)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        node, limit = self._node, self._limit
        node._exchanges.discard(limit)
        try:
            await limit.__aexit__(kind, error, trace)
        except TimeoutError as late:
            error = late
        if isinstance(error, aiohttp.ClientError | TimeoutError):
            if limit.expired():
                # Not lost: when the router's machine stands still, it finds all nodes silent at once. A
                # process that ends breaks its connections.
                raise NodeGoneError(node, node._why_ended, is_explained=True) from None
            raise node._broke(error) from error


class NodePool:
    """The nodes of one role.

    It is the only owner of the set of nodes; sources say which nodes they contribute.

    Args:
        urls: What the source `option` contributes.
        ejection: When requests that fail let a node be avoided.

    Attributes:
        on_forgotten: Called with the URL of a node that is no longer in the pool.
        on_ended: Called with the URL of a node whose process has ended, or that is no longer in the pool.
        on_occupancy: Called with the URL of a node and the load that it reported.
    """

    def __init__(
        self,
        role: Role,
        urls: Iterable[str] = (),
        *,
        ejection: EjectionRule | None = None,
    ) -> None:
        self.role = role
        self.on_forgotten: Callable[[str], None] = lambda url: None
        self.on_ended: Callable[[str], None] = lambda url: None
        self.on_occupancy: Callable[[str, Occupancy], None] = lambda url, occupancy: None
        self._ejection = ejection
        self._contributions = Contributions()
        self._nodes: dict[str, UpstreamNode] = {}
        self._start_watching: Callable[[UpstreamNode], None] = lambda node: None
        self._turns = itertools.count(1)
        self._is_closed = False
        self.contribute(OPTION, urls)

    @property
    def nodes(self) -> tuple[UpstreamNode, ...]:
        """All nodes, those that are leaving included, in the order in which they came."""
        return tuple(self._nodes.values())

    @property
    def has_ready_node(self) -> bool:
        return any(node.state is NodeState.READY for node in self._nodes.values())

    def report(self) -> list[dict[str, Any]]:
        """Return the router's view of the nodes as JSON."""
        return [
            {**node.report(), "sources": self._contributions.sources_of(node.url)}
            for node in self._nodes.values()
        ]

    # -- membership ----------------------------------------------------------------------------------

    def contribute(self, source: str, urls: Iterable[str]) -> None:
        """Replace what a source contributes.

        A node that no source names any more finishes its requests before it is forgotten. If a source names
        it again in the meantime, it stays.
        """
        named = dict.fromkeys(url.rstrip("/") for url in urls)
        change = self._contributions.update(source, named)
        for url in (url for url in named if url in change.added):
            if url in self._nodes:
                self._nodes[url].name_again()
            else:
                node = self._nodes[url] = UpstreamNode(self.role, url, self._ejection)
                node.on_ended = lambda url: self.on_ended(url)
                node.on_occupancy = lambda url, occupancy: self.on_occupancy(url, occupancy)
                if source != OPTION:
                    logger.info("added %s node %s: the source %r names it", self.role, url, source)
                self._start_watching(node)
        for url in sorted(change.dropped):
            self._nodes[url].drop()

    def server_name(self, url: str) -> str:
        """Return the name that a node's certificate must have, if that is not the host of its URL.

        Otherwise empty.
        """
        return next(filter(None, map(server_name_of, self.sources_of(url))), "")

    def named_by(self, source: str) -> frozenset[str]:
        """Return the URLs that a source contributes."""
        return self._contributions.named_by(source)

    def sources_of(self, url: str) -> tuple[str, ...]:
        """Return the sources that name a node."""
        return self._contributions.sources_of(url)

    @contextlib.asynccontextmanager
    async def watching(
        self, session: aiohttp.ClientSession, interval_s: float, timeout_s: float
    ) -> AsyncIterator[None]:
        """Check the nodes inside the block, and forget those that have left."""
        watchers: set[asyncio.Task[None]] = set()

        async def watch(node: UpstreamNode) -> None:
            await node.watch(session, interval_s, timeout_s)
            # No `await` between the end of the watch and this: a source could name the node again.
            del self._nodes[node.url]
            logger.info("removed %s node %s: it has finished its requests", self.role, node.url)
            self.on_forgotten(node.url)
            self.on_ended(node.url)

        def start(node: UpstreamNode) -> None:
            watcher = asyncio.create_task(watch(node))
            watchers.add(watcher)
            watcher.add_done_callback(watchers.discard)

        self._start_watching = start
        for node in self.nodes:
            start(node)
        try:
            yield
        finally:
            self._start_watching = lambda node: None
            ending = tuple(watchers)
            for watcher in ending:
                watcher.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    # -- choice --------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the exchanges in flight, and refuse to choose nodes from now on."""
        self._is_closed = True
        for node in self._nodes.values():
            node.stop("the router is stopping")

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def usable(
        self,
        tried: Tried,
        body: Mapping[str, Any],
        may_use: Callable[[UpstreamNode], bool] = lambda node: True,
    ) -> list[UpstreamNode]:
        """Return the nodes that can take a request and were not tried for it, the best first.

        None if the pool is closed.

        Of nodes that are equally well, the first is the one that was used least lately, so that they take
        turns.
        """
        nodes = [] if self._is_closed else [node for node in self.nodes if node.state in USABLE]
        fitting = (node for node in nodes if node not in tried and node.serves(body.get("model")))
        return sorted(filter(may_use, fitting), key=lambda node: (node.trouble, node.last_used))

    @contextlib.contextmanager
    def using(self, node: UpstreamNode, tried: Tried) -> Iterator[None]:
        """Count a request to the node for as long as the block lasts.

        A failure is one that `tried` has at its end.
        """
        tried[node] = None
        node.last_used = next(self._turns)
        node.in_flight += 1
        try:
            yield
        except NodeGoneError as error:
            tried[node] = error
            raise
        finally:
            node.in_flight -= 1
            if failure := tried.get(node):
                node.note_failed(failure)
            node.end_watch_if_idle()

    async def no_node(self, tried: Tried, body: Mapping[str, Any]) -> NoNodeError:
        """Return the error that says of each node why it cannot take a request.

        Takes up to `CAUSE_WAIT_S`.
        """
        if self._is_closed:
            what = f"the router is stopping: no {self.role} node can take the request"
            return NoNodeError(what, retry_after_s=None)
        if not self._nodes:
            return NoNodeError(
                f"no {self.role} node can take the request: the router knows no {self.role} node"
            )
        reasons = await asyncio.gather(*(_why_not(node, tried, body) for node in self.nodes))
        return NoNodeError(f"no {self.role} node can take the request ({'; '.join(reasons)})")


def _had_request(error: Exception) -> bool:
    """Whether a node may have received the request whose connection ended with this error."""
    # An outage refuses connections at one node after the other. That ends no node, so it must not use up the
    # limit.
    return isinstance(
        error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | aiohttp.ClientPayloadError
    ) and not isinstance(error, aiohttp.ClientConnectorError)


def _count_in(fields: Mapping[str, Any], name: str) -> int:
    """Return a number that a node has described; 0 if there is none."""
    return count if type(count := fields.get(name)) is int and count > 0 else 0


async def check_model(nodes: Sequence[UpstreamNode], model: object) -> None:
    """Check that a node serves the model of a request.

    Raises:
        ApiError: None does (404), or a request without a model could go to nodes with different ones (400).
    """
    known = [node.said.models for node in nodes if node.said.models]
    if known and not model and not frozenset.intersection(*known):
        served = ", ".join(sorted(frozenset().union(*known)))
        raise bad_request(f"'model' is missing: choose one of {served}", "model")
    if any(node.serves(model) for node in nodes) or not nodes:
        return
    # An adapter may have been loaded since the last check.
    ready = [node for node in nodes if node.state is NodeState.READY]
    await asyncio.gather(*(node.await_check(CAUSE_WAIT_S) for node in ready))
    if not any(node.serves(model) for node in nodes):
        message = (
            f"the model {str(model)[:MAX_SHOWN_CHARS]!r} does not exist; GET /v1/models lists those that do"
        )
        raise ApiError(404, message, kind="invalid_request_error", param="model", code="model_not_found")


async def _why_not(node: UpstreamNode, tried: Tried, body: Mapping[str, Any]) -> str:
    error = tried.get(node)
    if error is not None:
        return await error.explained()
    if not node.why and not node.serves(body.get("model")):
        return f"{node.url}: it does not serve the model {body['model'][:MAX_SHOWN_CHARS]!r}"
    return f"{node.url}: {node.why or ('already tried' if node in tried else 'not suitable')}"
