"""The nodes, their states, and the choice of the next one.

Only health checks change a node's state. If a request's connection breaks, the node is checked at once; one broken connection,
or one late check of a busy node, does not make the node `GONE`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

import aiohttp

from ..web.errors import ApiError
from .health import Health, NodeState, ask_health, reason_of

logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode"]
#: A node is gone after this many checks in a row without an answer.
FAILED_CHECKS_UNTIL_GONE = 2
#: The next check follows a failed one within this time.
RECHECK_S = 1.0
#: How long a client's error waits for the result of a fresh check.
CAUSE_WAIT_S = 2.0
#: By then a restarted node, or another one, may take the request.
RETRY_AFTER_S = 2


class NodeGoneError(Exception):
    """A node failed in its phase; another node may succeed. The message names the node and the reason.

    Attributes:
        is_explained: The reason comes from a health check; otherwise from the request itself.
    """

    def __init__(self, node: UpstreamNode, reason: str, *, is_explained: bool = False) -> None:
        super().__init__(f"{node.url}: {reason}")
        self.node = node
        self.is_explained = is_explained

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
        state: The state according to its health checks.
        in_flight: The router's requests at the node.
        last_error: Why the last check failed. Empty if it succeeded.
        load_failure_policy: The policy that the node reported last. Empty if it does not report one.
        is_suspect: Something failed since the last good check; other nodes are preferred.
    """

    def __init__(self, role: Role, url: str) -> None:
        self.role = role
        self.url = url.rstrip("/")
        self.state = NodeState.UNKNOWN
        self.in_flight = 0
        self.num_connection_failures = 0
        self.last_used = 0
        self.last_error = "not checked yet"
        self.load_failure_policy = ""
        self._num_failed_checks = 0
        self._reported = ""
        self._exchanges: set[asyncio.Timeout] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._check_is_wanted = asyncio.Event()

    @property
    def is_suspect(self) -> bool:
        return self._num_failed_checks > 0

    def note(self, health: Health) -> None:
        """Apply the result of a check."""
        if health.is_local:
            self._note_local(health.error)
            return
        self._num_failed_checks = 0 if health.state else self._num_failed_checks + 1
        self.last_error = health.error
        if health.is_reported or not health.error:
            self._reported = health.error
        elif self._reported:
            self.last_error += f"; before that {self._reported}"
        state = health.state
        if state is None:
            is_over = self._num_failed_checks >= FAILED_CHECKS_UNTIL_GONE
            state = NodeState.GONE if is_over else self.state
        if state is NodeState.READY:
            self.load_failure_policy = health.load_failure_policy
        self._change(state)
        if state is NodeState.GONE and health.ends_requests:
            # Do this at each such check, not only at the first: at the first one a request may have been writing to its client
            # rather than waiting for the node.
            self.end_exchanges()

    def _note_local(self, error: str) -> None:
        if error != self.last_error:
            logger.error("the router cannot check %s node %s: %s", self.role, self.url, error)
        self.last_error = error

    def _change(self, state: NodeState) -> None:
        if state is self.state:
            return
        is_gone, why = state is NodeState.GONE, f": {self.last_error}" if self.last_error else ""
        # A node that starts together with the router is no loss.
        is_awaited = is_gone and self.state is NodeState.UNKNOWN
        is_loss = is_gone and self.state not in (NodeState.DRAINING, NodeState.UNKNOWN)
        level = logging.WARNING if is_loss else logging.INFO
        what = "not ready yet" if is_awaited else state.value
        logger.log(level, "%s node %s is %s%s", self.role, self.url, what, why)
        self.state = state

    def suspect(self) -> None:
        """Request a check now, because a request failed in a way that suggests that the node is gone."""
        self._num_failed_checks = max(1, self._num_failed_checks)
        self._check_is_wanted.set()

    @contextlib.asynccontextmanager
    async def exchange(self) -> AsyncIterator[None]:
        """Wait for the node inside the block until health checks find it gone. There is no other limit.

        Raises:
            NodeGoneError: The connection broke, or health checks found the node gone.
        """
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._exchanges.add(limit)
                try:
                    yield
                finally:
                    self._exchanges.discard(limit)
        except (aiohttp.ClientError, TimeoutError) as error:
            if limit.expired():
                raise NodeGoneError(self, self.last_error, is_explained=True) from None
            self.num_connection_failures += 1
            self.suspect()
            raise NodeGoneError(self, reason_of(error)) from error

    def end_exchanges(self) -> None:
        """End every exchange in flight with `last_error`."""
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
        """Check the node again and again, and at once when a check is requested. Never returns."""
        while True:
            self._check_is_wanted.clear()
            waiting, self._waiting = self._waiting, []
            try:
                self.note(await ask_health(session, self.url, timeout_s))
            except Exception:
                # These checks are the only deadline of requests at this node, so a bug of ours must not end them.
                logger.exception("checking %s node %s failed", self.role, self.url)
                self.note(
                    Health(None, "the health check failed by a bug of the router; its log has the traceback")
                )
            for ended in waiting:
                if not ended.done():
                    ended.set_result(None)
            is_in_doubt = 0 < self._num_failed_checks < FAILED_CHECKS_UNTIL_GONE
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(interval_s, RECHECK_S) if is_in_doubt else interval_s):
                    await self._check_is_wanted.wait()


#: The nodes tried for one request, each with its error. None: no error so far.
Tried = dict[UpstreamNode, NodeGoneError | None]


class NodePool:
    """The nodes of one role."""

    def __init__(self, role: Role, urls: Sequence[str]) -> None:
        self.role = role
        self.nodes = tuple(UpstreamNode(role, url) for url in urls)
        self._turns = itertools.count(1)
        self._is_closed = False

    @property
    def has_ready_node(self) -> bool:
        return any(node.state is NodeState.READY for node in self.nodes)

    def close(self) -> None:
        """End the exchanges in flight, and refuse to choose nodes from now on."""
        self._is_closed = True
        for node in self.nodes:
            node.last_error = "the router is stopping"
            node.end_exchanges()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @contextlib.asynccontextmanager
    async def use_one(
        self, tried: Tried, may_use: Callable[[UpstreamNode], bool] | None = None
    ) -> AsyncIterator[UpstreamNode]:
        """Choose the ready node with the fewest requests that is not in `tried`, and add it there. Equal nodes take turns.

        If no node is ready, choose one that was never checked: a router that has just started has no others.

        Raises:
            NoNodeError: There is no such node (the message gives the reason for each node), or the pool is closed.
        """
        if self._is_closed:
            raise NoNodeError(
                f"the router is stopping: no {self.role} node can take the request", retry_after_s=None
            )
        candidates = self._candidates(tried, may_use or _any)
        if not candidates:
            raise await self._no_node(tried)
        node = min(candidates, key=lambda one: (_rank(one), one.in_flight, one.last_used))
        tried[node] = None
        node.last_used = next(self._turns)
        node.in_flight += 1
        try:
            yield node
        except NodeGoneError as error:
            tried[node] = error
            raise
        finally:
            node.in_flight -= 1

    async def require_one(self, tried: Tried) -> None:
        """Check that `use_one` would find a node.

        Raises:
            NoNodeError: It would not.
        """
        if not self._is_closed and not self._candidates(tried, _any):
            raise await self._no_node(tried)

    def _candidates(self, tried: Tried, may_use: Callable[[UpstreamNode], bool]) -> list[UpstreamNode]:
        usable = (NodeState.READY, NodeState.UNKNOWN)
        return [node for node in self.nodes if node.state in usable and node not in tried and may_use(node)]

    async def _no_node(self, tried: Tried) -> NoNodeError:
        reasons = await asyncio.gather(*(_why_not(node, tried) for node in self.nodes))
        return NoNodeError(f"no {self.role} node can take the request ({'; '.join(reasons)})")


def _any(node: UpstreamNode) -> bool:
    return True


def _rank(node: UpstreamNode) -> tuple[bool, bool]:
    """Sort ready nodes before unknown ones, and unsuspected nodes before suspected ones."""
    return node.state is NodeState.UNKNOWN, node.is_suspect


async def _why_not(node: UpstreamNode, tried: Tried) -> str:
    error = tried.get(node)
    if error is not None:
        return await error.explained()
    return f"{node.url}: {node.last_error or ('already tried' if node in tried else 'not suitable')}"
