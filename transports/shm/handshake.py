"""The handshake of a connection, on either side. `hello` says in which steps, and why in this order."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import ProtocolError
from .hello import FrameKind, Hello, decode_hello, encode_hello, encode_preface, require_preface
from .pools import PeerMemory, SharedPool
from .sockets import Connection


@dataclass(eq=False)
class Handshake:
    """A connection whose handshake is not over.

    Attributes:
        incoming: The other side connected to us.
        address: Where the listener of the two listens.
        has_preface: The listener's preface was sent, or came.
        hello: The other side's, once it came: then only its descriptors are missing.
    """

    connection: Connection
    incoming: bool
    address: str
    has_preface: bool = False
    hello: Hello | None = None

    def begin(self, allowed_uids: frozenset[int]) -> None:
        """Send the preface to a peer that connected, or begin to wait for that of a listener.

        Raises:
            PeerRefusedError: the other side runs as none of the users.
        """
        self.connection.require_user(allowed_uids)
        if self.incoming:
            self.connection.send(self.connection.frame(FrameKind.HELLO, encode_preface(self.address)))
            self.has_preface = True

    def on_frame(self, kind: FrameKind, body: bytes, pool: SharedPool) -> PeerMemory | None:
        """Take one more step.

        Returns:
            The other side's memory, after the last step.

        Raises:
            KVTransferError: the other side is not a peer that we accept.
        """
        if kind is FrameKind.HELLO and not self.has_preface:
            # Checked before anything is sent: the address may have led to another program.
            require_preface(body, self.address)
            self.has_preface = True
            self._send_hello(pool)
        elif kind is FrameKind.HELLO and self.hello is None:
            self.hello = decode_hello(body)
            # Only from here on does the socket take descriptors, and no more than the hello announced.
            self.connection.expect_descriptors(1 + self.hello.num_files)
        elif kind is FrameKind.DESCRIPTORS and self.hello is not None:
            if self.incoming:
                # Before the peer's memory is opened: if the two do not fit, each side finds out by itself
                # why.
                self._send_hello(pool)
            return self._open(self.hello, pool)
        else:
            raise out_of_order(kind)
        return None

    def _send_hello(self, pool: SharedPool) -> None:
        self.connection.send_hello(encode_hello(pool.hello), pool.descriptors)

    def _open(self, hello: Hello, pool: SharedPool) -> PeerMemory:
        descriptors = self.connection.take_descriptors()
        try:
            return pool.open_peer(hello, descriptors, self.connection.pid)
        finally:
            # The mappings do not need them, and a node with many peers would run out of descriptors.
            for descriptor in descriptors:
                os.close(descriptor)


def out_of_order(kind: FrameKind) -> ProtocolError:
    """The error for a frame that cannot come now."""
    return ProtocolError(f"the peer sent a {kind.name} frame out of order")
