"""Which nodes there are, what state each of them is in, and which one is next.

A node's state follows from its health checks alone. A request whose connection breaks only has the node checked at once:
one broken connection, or one late check of a busy node, does not make the node gone.
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
#: So many checks in a row that got no answer, and the node is gone.
FAILED_CHECKS_UNTIL_GONE = 2
#: The next check after a failed one comes at the latest after this.
RECHECK_S = 1.0
#: A client's error waits for what a fresh check finds out, but not for long.
CAUSE_WAIT_S = 2.0
#: A node that is started again, or another one, may take the request by then.
RETRY_AFTER_S = 2


class NodeGoneError(Exception):
    """A node did not do its stage; another one may. The message names the node and says why.

    Attributes:
        is_explained: The reason is what the health check knows; otherwise it is what the request saw.
    """

    def __init__(self, node: UpstreamNode, reason: str, *, is_explained: bool = False) -> None:
        super().__init__(f"{node.url}: {reason}")
        self.node = node
        self.is_explained = is_explained

    async def explained(self) -> str:
        """Say what happened together with what a fresh health check knows of it. Takes up to `CAUSE_WAIT_S`."""
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
        state: What the health checks make of it.
        in_flight: Requests of ours that it works on.
        last_error: What the last check that was not good found out, empty after a good one.
        load_failure_policy: What the node said last of its policy, empty if it does not tell.
        is_suspect: Something failed since the last good check; others are asked first.
    """

    def __init__(self, role: Role, url: str) -> None:
        self.role = role
        self.url = url.rstrip("/")
        self.state = NodeState.UNKNOWN
        self.in_flight = 0
        self.last_used = 0
        self.last_error = "not asked yet"
        self.load_failure_policy = ""
        self._num_failed_checks = 0
        self._said = ""
        self._exchanges: set[asyncio.Timeout] = set()
        self._waiting: list[asyncio.Future[None]] = []
        self._check_is_wanted = asyncio.Event()

    @property
    def is_suspect(self) -> bool:
        return self._num_failed_checks > 0

    def note(self, health: Health) -> None:
        """Take in the result of a check."""
        if health.is_local:
            self._note_local(health.error)
            return
        self._num_failed_checks = 0 if health.state else self._num_failed_checks + 1
        self.last_error = health.error
        if health.is_said or not health.error:
            self._said = health.error
        elif self._said:
            self.last_error += f"; before that {self._said}"
        state = health.state
        if state is None:
            is_over = self._num_failed_checks >= FAILED_CHECKS_UNTIL_GONE
            state = NodeState.GONE if is_over else self.state
        if state is NodeState.READY:
            self.load_failure_policy = health.load_failure_policy
        self._change(state)
        if state is NodeState.GONE and health.ends_requests:
            # At each such check, not only at the first: a request may have been busy with its client just then.
            self.end_exchanges()

    def _note_local(self, error: str) -> None:
        if error != self.last_error:
            logger.error("the router cannot check %s node %s: %s", self.role, self.url, error)
        self.last_error = error

    def _change(self, state: NodeState) -> None:
        if state is self.state:
            return
        is_loss = state is NodeState.GONE and self.state is not NodeState.DRAINING
        why = f": {self.last_error}" if self.last_error else ""
        level = logging.WARNING if is_loss else logging.INFO
        logger.log(level, "%s node %s is %s%s", self.role, self.url, state.value, why)
        self.state = state

    def suspect(self) -> None:
        """Have the node checked at once, because a request failed there as if the node were gone."""
        self._num_failed_checks = max(1, self._num_failed_checks)
        self._check_is_wanted.set()

    @contextlib.asynccontextmanager
    async def exchange(self) -> AsyncIterator[None]:
        """Talk to the node inside the block, for as long as it is not lost; nothing else bounds the wait.

        Raises:
            NodeGoneError: the connection broke, or health checks found the node gone.
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
            self.suspect()
            raise NodeGoneError(self, reason_of(error)) from error

    def end_exchanges(self) -> None:
        """Let every exchange that is under way fail, because of `last_error`."""
        exchanges, self._exchanges = self._exchanges, set()
        now = asyncio.get_running_loop().time()
        for limit in exchanges:
            limit.reschedule(now)

    async def await_check(self, timeout_s: float) -> None:
        """Wait until a check that begins from now on has ended, for at most so long."""
        ended = asyncio.get_running_loop().create_future()
        self._waiting.append(ended)
        self._check_is_wanted.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await ended

    async def watch(self, session: aiohttp.ClientSession, interval_s: float, timeout_s: float) -> None:
        """Check the node for ever, and at once when that is wanted."""
        while True:
            self._check_is_wanted.clear()
            waiting, self._waiting = self._waiting, []
            try:
                self.note(await ask_health(session, self.url, timeout_s))
            except Exception:
                # A bug of ours must not leave requests at this node without their only deadline.
                logger.exception("checking %s node %s failed", self.role, self.url)
                self.note(Health(None, "the check itself failed; the router's log has the traceback"))
            for ended in waiting:
                if not ended.done():
                    ended.set_result(None)
            is_in_doubt = 0 < self._num_failed_checks < FAILED_CHECKS_UNTIL_GONE
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(interval_s, RECHECK_S) if is_in_doubt else interval_s):
                    await self._check_is_wanted.wait()


#: What each node that was tried for a request made of it; None while it is at it.
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
        """Give no node to any request from now on, and end those that have one."""
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
        """Take the least loaded ready node that is not in `tried`, to which it is added; among equals, in turns.

        Without a ready one, nodes are tried of which nothing was heard yet: a router that was just started has no others.

        Raises:
            NoNodeError: there is none (the message says of each node why), or the pool is closed.
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
            NoNodeError: it would not.
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
    """The smaller the better."""
    return node.state is NodeState.UNKNOWN, node.is_suspect


async def _why_not(node: UpstreamNode, tried: Tried) -> str:
    error = tried.get(node)
    if error is not None:
        return await error.explained()
    return f"{node.url}: {node.last_error or ('already tried' if node in tried else 'not suitable')}"
