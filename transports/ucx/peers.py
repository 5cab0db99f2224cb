"""One peer each: from the first connection to the last read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..base import Event
from ..errors import KVTransferError
from ..regions import Pool
from .channel import Channel
from .library import Context, Worker
from .options import UCXOptions
from .reads import Reader
from .serving import PoolServer, Server
from .wire import Hello, Ping

#: A node says something at least this many times in the time after which it is taken for lost.
_PINGS = 4


@dataclass(frozen=True)
class Local:
    """What this process is to every peer."""

    options: UCXOptions
    context: Context
    source: PoolServer
    events: list[Event]

    def hello(self, worker: Worker, mechanism: str) -> bytes:
        """The frame that says who we are."""
        sizes = tuple(segment.num_bytes for segment in self.source.pool.segments)
        return Hello(self.source.guards.num_guards, sizes, worker.address, mechanism).encode()

    @property
    def ping_interval_s(self) -> float:
        return self.options.peer_timeout_s / _PINGS


class Greeting:
    """A connection that is not a peer yet, or never will be.

    Attributes:
        is_prefaced: The other side's preface came: it is a node, of our version.
        workers: The one that we told the other side of, if we did.
        hellos: The other side's, once it came: then only its ready is missing.
    """

    def __init__(
        self, peer_id: int, channel: Channel, incoming: bool, timeout_s: float, deadline: float
    ) -> None:
        self.peer_id = peer_id
        self.channel = channel
        self.incoming = incoming
        self.timeout_s = timeout_s
        self.deadline = deadline
        self.is_prefaced = False
        self.workers: list[Worker] = []
        self.hellos: list[Hello] = []

    def close(self) -> None:
        try:
            self.channel.close()
        finally:
            while self.workers:
                self.workers.pop().close()


class Peer:
    """The other side of a finished handshake.

    Args:
        mechanism: What the peer says that it sends by.
    """

    def __init__(self, local: Local, greeting: Greeting, hello: Hello, mechanism: str) -> None:
        self.peer_id = greeting.peer_id
        self.incoming = greeting.incoming
        self.channel = greeting.channel
        (self.worker,) = greeting.workers
        self.num_guards = hello.num_guards
        self.pool: Pool = hello.pool()
        stages = local.source.stages
        self.reader = Reader(local.options, self.worker, self.channel, stages, mechanism, local.events)
        self.server = Server(local.source, self.worker, self.channel)

    def settle(self) -> bool:
        """Let UCX work, and deal with what it has finished. Returns whether UCX had anything to do.

        Raises:
            PeerLostError: UCX lost the peer.
            ProtocolError: the peer sent more than was asked for.
        """
        has_worked = self.worker.progress()
        self.server.settle()
        self.reader.settle()
        return has_worked

    @property
    def num_under_way(self) -> int:
        """Slices, of either side's reads."""
        return self.server.num_under_way + self.reader.num_under_way

    def keep_alive(self, now: float, interval_s: float) -> None:
        """Say something, if nothing was said for a while."""
        if now - self.channel.last_said >= interval_s and not self.channel.num_unsent:
            self.channel.send(Ping().encode())

    def deadlines(self, interval_s: float) -> Iterator[float]:
        """When something becomes due."""
        yield self.channel.last_said + interval_s
        yield from self.reader.deadlines()

    def close(self, error: KVTransferError) -> None:
        """Cut everything; end the reads with `error`."""
        try:
            self.channel.close()
        finally:
            try:
                self.worker.close()
            finally:
                self.reader.end_all(error)
