"""Which nodes there are, which of them answer, and which one is next."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Literal

import aiohttp

from web.errors import unavailable

__all__ = ["Node", "NodePool", "Role"]

logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode"]
#: A node that does not answer `/health` for so long is not well.
HEALTH_TIMEOUT_S = 5.0


class Node:
    """One node as the router sees it.

    Attributes:
        is_healthy: It answered the last check, and no request found it gone since.
        is_unknown: Nothing was heard of it yet.
        in_flight: Requests of ours that it works on.
        last_error: Why it is not healthy, else empty.
    """

    def __init__(self, role: Role, url: str) -> None:
        self.role = role
        self.url = url.rstrip("/")
        self.is_healthy = False
        self.is_unknown = True
        self.in_flight = 0
        self.last_used = 0
        self.last_error = "not asked yet"

    def mark_up(self) -> None:
        if not self.is_healthy:
            logger.info("%s node %s is ready", self.role, self.url)
        self.is_healthy, self.is_unknown, self.last_error = True, False, ""

    def mark_down(self, reason: str) -> None:
        if self.is_healthy:
            logger.warning("%s node %s is gone: %s", self.role, self.url, reason)
        self.is_healthy, self.is_unknown, self.last_error = False, False, reason

    async def check(self, session: aiohttp.ClientSession) -> None:
        """Ask `/health` once."""
        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
            async with session.get(f"{self.url}/health", timeout=timeout) as response:
                if response.status == 200:
                    self.mark_up()
                else:
                    self.mark_down(f"/health says {response.status}")
        except TimeoutError:
            self.mark_down(f"/health did not answer within {HEALTH_TIMEOUT_S:g} s")
        except aiohttp.ClientError as error:
            self.mark_down(str(error))


class NodePool:
    """The nodes of one role."""

    def __init__(self, role: Role, urls: Sequence[str]) -> None:
        self.role = role
        self.nodes = tuple(Node(role, url) for url in urls)
        self._turns = itertools.count(1)
        self._is_closed = False

    @property
    def has_healthy_node(self) -> bool:
        return any(node.is_healthy for node in self.nodes)

    def close(self) -> None:
        """From now on give no node to anybody."""
        self._is_closed = True

    @contextlib.contextmanager
    def use_one(self, tried: set[Node]) -> Iterator[Node]:
        """Take the least loaded healthy node that is not in `tried`, to which it is added; among equals, in turns.

        Without a healthy one, nodes are tried of which nothing was heard yet: a router that was just started has no others.

        Raises:
            ApiError: there is none (503, saying of each node why), or the pool is closed (503).
        """
        if self._is_closed:
            raise unavailable(f"the router stops, so that no {self.role} node can take the request")
        candidates = [n for n in self.nodes if (n.is_healthy or n.is_unknown) and n not in tried]
        if not candidates:
            reasons = "; ".join(f"{node.url}: {node.last_error or 'already tried'}" for node in self.nodes)
            raise unavailable(f"no {self.role} node can take the request ({reasons})")
        node = min(candidates, key=lambda one: (one.is_unknown, one.in_flight, one.last_used))
        tried.add(node)
        node.last_used = next(self._turns)
        node.in_flight += 1
        try:
            yield node
        finally:
            node.in_flight -= 1

    async def watch(self, session: aiohttp.ClientSession, interval_s: float) -> None:
        """Check every node, for ever."""
        while True:
            await asyncio.gather(*(node.check(session) for node in self.nodes))
            await asyncio.sleep(interval_s)
