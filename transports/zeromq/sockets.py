"""Every socket of a process: opened, waited for, and closed here."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator

import zmq

from .._poller import Poller
from .links import Arrival, Context, DialedLink, Link, Loss, Port
from .listener import Listener, advertised_host, bind
from .options import Address, ZeroMQOptions
from .security import Authenticator, Security

__all__ = ["Sockets"]


#: The largest block that glibc lets raise its thresholds, less what it needs itself.
_LARGEST_BLOCK_BYTES = (32 << 20) - (64 << 10)


class Sockets:
    """Opens connections and tells what arrives over them.

    Args:
        waker: What ends a `wait`.
    """

    def __init__(self, options: ZeroMQOptions, security: Security, waker: Poller) -> None:
        self._options = options
        self._security = security
        self._waker = waker
        self._ids = itertools.count(1)
        _let_malloc_keep_messages()
        self._context: Context = zmq.Context(io_threads=options.io_threads)
        self._poller = zmq.Poller()
        self._poller.register(waker, zmq.POLLIN)
        self._ports: list[Port] = []
        self._authenticators: list[Authenticator] = []

    def next_id(self) -> int:
        """A peer id that was not used before."""
        return next(self._ids)

    def listen(self, host: str, ports: range) -> str:
        """Accept peers on the first free port; returns the address to give to them.

        Raises:
            ConfigurationError: see `bind`, `Security.for_listening` and `advertised_host`. Nothing is open.
        """
        bound = bind(self._options, host, ports)
        try:
            keys = self._security.for_listening(bound.getsockname()[0])
            server_key = b"".join(key.public_bytes for key in keys)
            address = Address(advertised_host(self._options, bound), bound.getsockname()[1], server_key)
        except BaseException:
            bound.close()
            raise
        if keys and not self._authenticators:
            self._authenticators.append(Authenticator(self._context, keys[0].allowed))
            self._poller.register(self._authenticators[0].socket, zmq.POLLIN)
        self._add(Listener(self._context, bound, keys, self._options, self.next_id))
        return str(address)

    def dial(self, peer_id: int, address: Address) -> DialedLink:
        """Begin to connect.

        Raises:
            PeerRefusedError: the peer is not one we talk to. Nothing was sent.
            ConfigurationError: libzmq does not accept the address.
        """
        keys = self._security.for_connecting(address)
        link = DialedLink(self._context, peer_id, address, keys, self._options)
        self._add(link)
        return link

    def _add(self, port: Port) -> None:
        self._ports.append(port)
        for socket in port.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def hang_up(self, link: Link) -> None:
        """Close one connection."""
        if isinstance(link, DialedLink) and link in self._ports:
            self._ports.remove(link)
            for socket in link.sockets:
                self._poller.unregister(socket)
        link.drop()

    def wait(self, timeout_s: float) -> None:
        """Wait until something may have happened."""
        self._poller.poll(max(0, round(timeout_s * 1000)))
        self._waker.poll(0.0)

    def pump(self) -> Iterator[Arrival | Loss]:
        """Take what happened on every connection; never blocks."""
        for authenticator in self._authenticators:
            authenticator.answer()
        for port in list(self._ports):
            yield from port.pump()

    def close(self) -> None:
        """Close everything. Takes no longer than libzmq's linger period, whatever the peers do."""
        for port in self._ports:
            port.close()
        self._ports.clear()
        for authenticator in self._authenticators:
            authenticator.socket.close()
        self._context.term()


def _let_malloc_keep_messages() -> None:
    """Have freed messages used again, not given back to the system and taken anew, which costs as much as a copy.

    How much freed memory glibc keeps, it derives from the largest block that was freed so far. With another C
    library this does nothing.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.free(libc.malloc(ctypes.c_size_t(_LARGEST_BLOCK_BYTES)))
