"""What a node keeps per peer: a `Lookup`, then a `Handshake`, then a `Link`."""

from __future__ import annotations

from dataclasses import dataclass

from ..regions import Pool
from .channel import Channel
from .library import Worker
from .options import Address
from .reads import Reader
from .serving import Server
from .wire import Hello


@dataclass(frozen=True, eq=False)
class Lookup:
    """A peer to connect to, until the address of its host is known."""

    address: Address


@dataclass(eq=False)
class Handshake:
    """A connection that is not a peer yet, and may never be one.

    Attributes:
        is_prefaced: The other side's preface came: it is a node, of our version.
        worker: Ours for this peer, as soon as the peer needs to know its address.
        hello: The other side's, as soon as it came: then only its ready is missing.
    """

    channel: Channel
    is_prefaced: bool = False
    worker: Worker | None = None
    hello: Hello | None = None

    def close(self) -> None:
        try:
            self.channel.close()
        finally:
            if self.worker is not None:
                self.worker.close()


@dataclass(frozen=True, eq=False)
class Link:
    """The connection to a peer whose handshake is over.

    Attributes:
        num_guards: Of the peer's table.
        pool: The peer's run of offsets.
        mechanism: What the peer says that it sends by.
    """

    channel: Channel
    worker: Worker
    num_guards: int
    pool: Pool
    mechanism: str
    reader: Reader
    server: Server

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
    def num_in_flight(self) -> int:
        """Slices, of either side's reads."""
        return self.server.num_in_flight + self.reader.num_in_flight

    def close(self) -> None:
        """Cut everything. Afterwards nothing is written into our memory any more."""
        try:
            self.channel.close()
        finally:
            self.worker.close()


Connection = Lookup | Handshake | Link
