"""Where nodes come from at run time: a file that is read again when it changes, and DNS names."""

from __future__ import annotations

import asyncio
import logging
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from aiohttp.abc import AbstractResolver
from aiohttp.resolver import DefaultResolver

from .membership import FILE, BadNodesError, DnsTarget, Role, parse_nodes

logger = logging.getLogger(__name__)

#: Seconds between two looks at the file.
FILE_INTERVAL_S = 1.0
#: No list of nodes is longer than this, so this is another file.
MAX_FILE_BYTES = 1 << 20

#: `contribute(source, nodes)` replaces what a source contributes to the roles in `nodes`.
Contribute = Callable[[str, Mapping[Role, Collection[str]]], None]


class NodeSource(ABC):
    """A source of nodes. If it fails, the nodes that it named last stay, and the log says why once.

    Attributes:
        name: The name of the source in `/nodes` and in the log.
        problem: Why the last look-up failed. Empty if it succeeded.
    """

    def __init__(self, name: str, interval_s: float) -> None:
        self.name = name
        self.problem = ""
        self._interval_s = interval_s

    @abstractmethod
    async def look_up(self) -> Mapping[Role, Collection[str]]:
        """Return the URLs of the nodes that exist now, for each role that the source knows.

        Raises:
            LookUpError: The source cannot be read.
        """

    async def refresh(self, contribute: Contribute) -> None:
        """Look up the nodes once, and contribute them if that succeeds."""
        try:
            contribute(self.name, await self.look_up())
        except LookUpError as error:
            if str(error) != self.problem:
                # A name without addresses is normal while its nodes start.
                logger.warning(
                    "%s; the router keeps the nodes that it read there last, and looks again every %g s",
                    *(error, self._interval_s),
                )
            self.problem = str(error)
            return
        except Exception as error:
            # A bug of ours must not end the look-ups: the router would never learn of a node again.
            logger.exception("looking up the nodes of %r failed", self.name)
            self.problem = f"{type(error).__name__}: {error}"
            return
        if self.problem:
            logger.info("the nodes of %r can be read again", self.name)
        self.problem = ""

    async def run(self, contribute: Contribute) -> None:
        """Refresh again and again. Never returns."""
        while True:
            await self.refresh(contribute)
            await asyncio.sleep(self._interval_s)

    def report(self) -> dict[str, Any]:
        """Return the source's state as JSON."""
        return {"name": self.name, "problem": self.problem}


class LookUpError(Exception):
    """A source cannot be read. The message names the source and the reason."""


class NodesFile(NodeSource):
    """A file with the lists `prefill` and `decode`: JSON if its name ends with `.json`, otherwise TOML.

    The whole file is read each time. Times and sizes of files may stay the same when the content changes, and
    a mounted configuration map replaces the folder instead of the file.
    """

    def __init__(self, path: Path, interval_s: float = FILE_INTERVAL_S) -> None:
        super().__init__(FILE, interval_s)
        self._path = path

    async def look_up(self) -> Mapping[Role, Collection[str]]:
        return await asyncio.to_thread(self.read)  # the file may be on a slow network

    def read(self) -> Mapping[Role, Collection[str]]:
        """Read the file now.

        Raises:
            LookUpError: It cannot be read, or its content is malformed.
        """
        what = f"cannot read --nodes-file {str(self._path)!r}"
        try:
            with self._path.open("rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise LookUpError(f"{what}: {error.strerror or error}") from None
        if len(raw) > MAX_FILE_BYTES:
            raise LookUpError(f"{what}: it has more than {MAX_FILE_BYTES} bytes")
        try:
            return parse_nodes(raw, is_json=self._path.suffix == ".json")
        except BadNodesError as error:
            raise LookUpError(f"{what}: {error}") from None


class DnsName(NodeSource):
    """A DNS name, each address of which is a node.

    If the name has addresses of both families, only those of IPv4 count: they belong to the same nodes.

    Args:
        resolver: Resolves the name. By default as the system does.
    """

    def __init__(
        self, role: Role, target: DnsTarget, interval_s: float, resolver: AbstractResolver | None = None
    ) -> None:
        super().__init__(str(target), interval_s)
        self._role = role
        self._target = target
        self._resolver = resolver

    async def look_up(self) -> Mapping[Role, Collection[str]]:
        if self._resolver is None:
            self._resolver = DefaultResolver()  # it needs the running loop
        name, port = self._target.name, self._target.port
        try:
            found = await self._resolver.resolve(name, port, family=socket.AF_UNSPEC)
        except OSError as error:
            raise LookUpError(f"cannot resolve {self.name!r}: {error.strerror or error}") from None
        addresses = {answer["host"] for answer in found}
        if not addresses:
            # A name without addresses does not mean that its nodes should end: their own checks will tell.
            raise LookUpError(f"cannot resolve {self.name!r}: the name has no address")
        version_4 = {address for address in addresses if ":" not in address}
        return {self._role: {self._target.url_of(address) for address in version_4 or addresses}}
