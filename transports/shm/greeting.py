"""How a connection begins, on either side. `hello` says in which steps, and why in this order."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from .._frames import encode_frame
from ..errors import ProtocolError
from .hello import FrameKind, Hello, decode_hello, encode_greeting, encode_hello, require_greeting
from .pools import LocalMemory, PeerMemory
from .sockets import Connection


@dataclass
class Greeting:
    """A connection that is not a peer yet, or never will be.

    Attributes:
        address: Where the listener of the two listens.
        is_greeted: The listener's greeting was sent, or came.
        hellos: The other side's, once it came: then only its descriptors are missing.
    """

    peer_id: int
    incoming: bool
    connection: Connection
    deadline: float
    address: str
    is_greeted: bool = False
    hellos: list[Hello] = field(default_factory=list)

    def begin(self, allowed_uids: frozenset[int]) -> None:
        """Greet a peer that connected; of a listener, wait for its greeting.

        Raises:
            PeerRefusedError: the other side runs as none of the users.
        """
        self.connection.require_user(allowed_uids)
        if self.incoming:
            self.connection.send(encode_frame(FrameKind.HELLO, encode_greeting(self.address)))
            self.is_greeted = True

    def on_frame(self, kind: FrameKind, body: bytes, memory: LocalMemory) -> PeerMemory | None:
        """Take one more step.

        Returns:
            The other side's memory, after the last one.

        Raises:
            KVTransferError: the other side is none that we talk to.
        """
        if kind is FrameKind.HELLO and not self.is_greeted:
            require_greeting(body, self.address)
            self.is_greeted = True
            self._say_hello(memory)
        elif kind is FrameKind.HELLO and not self.hellos:
            self.hellos.append(decode_hello(body))
            self.connection.expect_descriptors(1 + self.hellos[0].num_files)
        elif kind is FrameKind.DESCRIPTORS and self.hellos:
            if self.incoming:
                # Before the peer's memory is opened: if the two do not fit, each side finds out by itself how.
                self._say_hello(memory)
            return self._open(memory)
        else:
            raise out_of_order(kind)
        return None

    def _say_hello(self, memory: LocalMemory) -> None:
        self.connection.send_hello(encode_hello(memory.hello), memory.descriptors)

    def _open(self, memory: LocalMemory) -> PeerMemory:
        descriptors = self.connection.take_descriptors()
        try:
            return memory.open_peer(self.hellos[0], descriptors, self.connection.pid)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def out_of_order(kind: FrameKind) -> ProtocolError:
    """The error for a frame that cannot come now."""
    return ProtocolError(f"the peer sent a {kind.name} frame out of order")
