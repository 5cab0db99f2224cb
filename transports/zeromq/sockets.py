"""Every socket of a process: opened, waited for, and closed here."""

from __future__ import annotations

import ctypes
import itertools
import logging
import time
from collections.abc import Iterator

import zmq

from .._descriptors import Reserve, descriptor_limit, warn_if_few
from .._limited_log import LimitedLog
from .._lookups import Found
from .._outside import outside, survived, typed, unexpected
from .._poller import Poller
from ..errors import ConfigurationError
from .links import Arrival, Context, DialedLink, Link, Loss, Port
from .listener import Listener, advertised_host, bind
from .options import SCHEME, Address, ZeroMQOptions
from .security import Authenticator, CurveKeys, Security

logger = logging.getLogger(__name__)

#: A connection that we make takes two sockets of libzmq and a monitor's end, an eventfd each, and one of TCP.
_PER_CONNECTION = 4

#: Held back: as many refused connections can be on their way out at a time.
_NUM_HELD = 8

#: How long to wait where libzmq cannot: the owner's loop must not spin.
_REST_S = 0.01

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
        self.log = LimitedLog(logger)
        self._broken: list[Loss] = []
        warn_if_few(SCHEME, _NUM_HELD, options.max_connecting, _PER_CONNECTION)
        _let_malloc_keep_messages()
        self._reserve = Reserve(_NUM_HELD)
        self._context = self._make_context()
        self._poller = zmq.Poller()
        self._poller.register(waker, zmq.POLLIN)
        self._ports: list[Port] = []
        self._authenticators: list[Authenticator] = []

    def _make_context(self) -> Context:
        """A context whose threads run.

        libzmq starts them with the first socket, and aborts the process if it finds no descriptor for one of them:
        so that socket is made here, where there are enough for certain.
        """
        num_threads = self._options.io_threads
        context: Context = zmq.Context(io_threads=num_threads)
        try:
            # Each socket takes a descriptor at least, so the limit on those is the only one that is left.
            context.set(zmq.MAX_SOCKETS, max(1023, min(descriptor_limit(), context.get(zmq.SOCKET_LIMIT))))
            with self._reserve.lent(2 * num_threads + 6, "cannot start libzmq"):
                context.socket(zmq.PAIR).close()
        except BaseException:
            context.destroy(linger=0)
            self._reserve.close()
            raise
        return context

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
            with outside(f"cannot listen on {address}", ConfigurationError):
                if keys and not self._authenticators:
                    self._authenticators.append(Authenticator(self._context, keys[0].allowed, self.log))
                    self._poller.register(self._authenticators[0].socket, zmq.POLLIN)
                listener = Listener(
                    *(self._context, bound, keys, self._options),
                    *(self.next_id, self._reserve, self.report, self.log),
                )
        except BaseException:
            bound.close()
            raise
        self._add(listener)
        return str(address)

    def keys_for(self, address: Address) -> tuple[CurveKeys, ...]:
        """See `Security.for_connecting`."""
        return self._security.for_connecting(address)

    def dial(self, peer_id: int, address: Address, found: Found, keys: tuple[CurveKeys, ...]) -> DialedLink:
        """Begin to connect.

        Raises:
            BackpressureError: there are no descriptors, or no sockets of libzmq's, for another connection.
            TransportError: libzmq does not connect there.
        """
        what = f"cannot connect to {address.host}:{address.port}"
        # libzmq opens the connection later, and says nothing if it finds no descriptor for it.
        self._reserve.require(_PER_CONNECTION, what)
        try:
            link = DialedLink(self._context, peer_id, address, found, keys, self._options, self.report)
        except Exception as error:
            # That there is no room for another socket has the same errno as a lack of descriptors.
            limit = f"or libzmq's limit of {self._context.get(zmq.MAX_SOCKETS)} sockets"
            raise typed(error, what, limit=limit) from error
        try:
            self._add(link)
        except Exception as error:
            self.hang_up(link)
            raise typed(error, what) from error
        return link

    def report(self, link: Link, error: Exception) -> None:
        """Have `pump` tell that a connection is lost."""
        self._broken.append(Loss(link, unexpected(error, f"lost peer {link.peer_id}", self.log)))

    @property
    def has_broken(self) -> bool:
        """Whether `pump` has something to report that no socket signals."""
        return bool(self._broken)

    def _add(self, port: Port) -> None:
        self._ports.append(port)
        for socket in port.sockets:
            self._poller.register(socket, zmq.POLLIN)

    def hang_up(self, link: Link) -> None:
        """Close one connection."""
        if isinstance(link, DialedLink) and link in self._ports:
            self._ports.remove(link)
            for socket in link.sockets:
                with survived("cannot stop waiting for a connection", self.log):
                    self._poller.unregister(socket)
        with survived("cannot close a connection", self.log):
            link.drop()

    def wait(self, timeout_s: float) -> None:
        """Wait until something may have happened."""
        try:
            self._poller.poll(max(0, round(timeout_s * 1000)))
        except Exception as error:
            self.log.warning("cannot wait for ZeroMQ's sockets: %r", error, exc_info=error)
            time.sleep(min(max(timeout_s, 0.0), _REST_S))
        self._waker.poll(0.0)

    def pump(self) -> Iterator[Arrival | Loss]:
        """Take what happened on every connection; never blocks."""
        for authenticator in self._authenticators:
            try:
                authenticator.answer()
            except Exception as error:
                self.log.warning("cannot answer who may connect: %r", error, exc_info=error)
        for port in list(self._ports):
            try:
                yield from port.pump()
            except Exception as error:
                if isinstance(port, Link):
                    self.report(port, error)
                else:
                    self.log.warning("cannot receive from accepted peers: %r", error, exc_info=error)
        while self._broken:
            yield self._broken.pop(0)

    def close(self) -> None:
        """Close everything. Takes no longer than libzmq's linger period, whatever the peers do."""
        for port in self._ports:
            try:
                port.close()
            except zmq.ZMQError as error:
                logger.warning("cannot close a connection cleanly: %s", error)
        self._ports.clear()
        for authenticator in self._authenticators:
            authenticator.socket.close()
        # Closes what could not be closed before: an open socket would keep the context from ever terminating.
        self._context.destroy(linger=0)
        self._reserve.close()
        self.log.flush()


def _let_malloc_keep_messages() -> None:
    """Have freed messages used again, not given back to the system and taken anew, which costs as much as a copy.

    How much freed memory glibc keeps, it derives from the largest block that was freed so far. With another C
    library this does nothing.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.free(libc.malloc(ctypes.c_size_t(_LARGEST_BLOCK_BYTES)))
