"""Accepted connections: one ROUTER for all of them, told apart by libzmq's routing ids.

A ROUTER neither tells that a peer is gone nor drops one. Both go by the descriptor of the connection: libzmq's
monitor names it when a connection comes and goes, and every message carries it; what is shut down at the operating
system is gone for libzmq as well, and the peer notices at once.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import zmq

from .._descriptors import Reserve, remedy
from .._limited_log import LimitedLog
from .._tcp import bind_first, is_wildcard
from ..errors import ConfigurationError, PeerLostError
from .frames import Frame
from .links import (
    RECEIVE_BATCH,
    Arrival,
    Broken,
    Context,
    Link,
    Loss,
    Monitor,
    Parts,
    Torn,
    configure,
    offer,
    receive,
)
from .options import Address, ZeroMQOptions
from .security import CurveKeys

_BACKLOG = 128


def bind(options: ZeroMQOptions, host: str, ports: range) -> socket.socket:
    """Listen on the first of `ports` that is free.

    Raises:
        ConfigurationError: the host is not ours, no port is free, or the congestion control is not there.
    """

    def prepare(bound: socket.socket) -> None:
        if options.congestion_control:
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, options.congestion_control.encode())

    return bind_first(host, ports, _BACKLOG, prepare)


class AcceptedLink(Link):
    """A connection that a peer made."""

    def __init__(
        self, peer_id: int, listener: Listener, routing_id: bytes, descriptor: int, on_broken: Broken
    ) -> None:
        super().__init__(peer_id, on_broken, incoming=True, is_encrypted=listener.is_encrypted)
        self.is_dropped = False
        self.routing_id: Final = routing_id
        self.descriptor: Final = descriptor
        self._listener = listener

    def _offer(self, parts: Parts) -> bool:
        return self.is_dropped or self._listener.offer(self.routing_id, parts)

    def _hang_up(self) -> None:
        if not self.is_dropped:
            self.is_dropped = True
            self._listener.hang_up(self)


class Listener:
    """Accepts peers on one port. See the module.

    Args:
        bound: A listening socket. The listener owns it, from when it is made.
        make_peer_id: Gives each new connection its id.
        reserve: Descriptors to refuse connections with when there are no others.
        on_broken: See `Link`.
    """

    def __init__(
        self,
        context: Context,
        bound: socket.socket,
        keys: tuple[CurveKeys, ...],
        options: ZeroMQOptions,
        make_peer_id: Callable[[], int],
        reserve: Reserve,
        on_broken: Broken,
        log: LimitedLog,
    ) -> None:
        self.is_encrypted = bool(keys)
        self._port: int = bound.getsockname()[1]
        self._make_peer_id = make_peer_id
        self._options = options
        self._reserve = reserve
        self._on_broken = on_broken
        self._log = log
        # By descriptor. A connection has no link until its first message has come, and is silent until then.
        self._connections: dict[int, list[AcceptedLink]] = {}
        self._silent: dict[int, float] = {}  # with the deadline; the oldest first
        self._links: dict[bytes, AcceptedLink] = {}
        self._gone: deque[AcceptedLink] = deque()
        self._blank = os.eventfd(0, os.EFD_CLOEXEC)
        self._spare = os.dup(self._blank)
        try:
            self._router = context.socket(zmq.ROUTER)
        except BaseException:
            self._close_spare()
            raise
        try:
            configure(self._router, options)
            self._router.router_mandatory = True
            for key in keys:
                key.protect_server(self._router)
            self._monitor = Monitor(context, self._router)
        except BaseException:
            self._close_spare()
            self._router.close(linger=0)
            raise
        self.sockets = (self._router, self._monitor.socket)
        try:
            host = bound.getsockname()[0]
            self._router.setsockopt(zmq.USE_FD, bound.detach())
            self._router.bind(Address(host, self._port).endpoint)
        except BaseException:
            self.close()
            raise

    def pump(self) -> Iterator[Arrival | Loss]:
        self._watch()
        self._hang_up_on_the_silent()
        for _ in range(RECEIVE_BATCH):
            try:
                frames = receive(self._router)
            except Torn as error:
                self._lose_torn(error)
                continue
            if frames is None:
                break
            link = self._link_of(frames[0])
            if link is not None and not link.is_dropped:
                yield Arrival(link, frames[1:])
        else:
            return  # a loss is told after the last message
        while self._gone:
            link = self._gone.popleft()
            self._links.pop(link.routing_id, None)
            was_dropped, link.is_dropped = link.is_dropped, True
            if not was_dropped:
                yield Loss(link, PeerLostError("the peer's connection is gone"))

    def _lose_torn(self, torn: Torn) -> None:
        """A message is lost, and whose it was is known: its peer must not wait for an answer."""
        link = self._link_of(torn.frames[0])
        if link is not None and not link.is_dropped:
            self._on_broken(link, torn)

    def _watch(self) -> None:
        for event, value in self._monitor.take():
            if event == zmq.EVENT_ACCEPTED:
                self._on_accepted(value)
            elif event == zmq.EVENT_ACCEPT_FAILED:
                # Out of descriptors. The kernel keeps reporting the pending connection, and libzmq's thread would try
                # again and again; with what is held back it can accept it, and then it is refused.
                self._reserve.spend()
            elif event == zmq.EVENT_DISCONNECTED and value in self._connections:
                self._silent.pop(value, None)
                self._gone.extend(self._connections.pop(value))

    def _on_accepted(self, descriptor: int) -> None:
        self._connections[descriptor] = []
        if not self._reserve.refill():
            self._log.warning("refused a connection: no file descriptors are left; %s", remedy())
            self._shut_down(descriptor)
            return
        self._silent[descriptor] = time.monotonic() + self._options.handshake_timeout_s
        if len(self._silent) > self._options.max_connecting:
            # Peers say hello at once, so it is hardly one of them that has been silent for the longest time.
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            self._log.warning(
                "dropped a connection: %d others have said nothing yet (option max_connecting)",
                self._options.max_connecting,
            )
            self._shut_down(oldest)

    def _hang_up_on_the_silent(self) -> None:
        now = time.monotonic()
        for descriptor, deadline in self._silent.items():
            if deadline > now:
                return
            self._shut_down(descriptor)

    def _link_of(self, frame: Frame) -> AcceptedLink | None:
        """The link that a message with this first frame came over, or None if it is gone before it was ever known."""
        routing_id = bytes(frame)
        known = self._links.get(routing_id)
        if known is not None:
            return known
        # Descriptors are used again, but the monitor told of this connection before its message came.
        self._watch()
        # Of a connection by a ZMTP of before 2013 libzmq does not say it: to us, it stays silent.
        descriptor = frame.descriptor
        if (links := self._connections.get(descriptor)) is None:
            return None
        self._silent.pop(descriptor, None)
        link = AcceptedLink(self._make_peer_id(), self, routing_id, descriptor, self._on_broken)
        links.append(link)
        self._links[link.routing_id] = link
        return link

    def offer(self, routing_id: bytes, parts: Parts) -> bool:
        """Send to one peer; False if its queue is full."""
        return offer(self._router, [routing_id, *parts])

    def hang_up(self, link: AcceptedLink) -> None:
        """Shut a connection down. Its end arrives through the monitor."""
        self._watch()
        if link in self._connections.get(link.descriptor, ()):
            self._shut_down(link.descriptor)

    def _shut_down(self, descriptor: int) -> None:
        # Over a descriptor that is there for this: connections most need to be closed when there is no other.
        try:
            os.dup2(descriptor, self._spare, inheritable=False)
            connection = socket.socket(fileno=self._spare)
        except OSError:
            return
        try:
            # libzmq may have closed it just now: then the number may already stand for something else.
            if connection.getsockname()[1] == self._port:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        finally:
            connection.detach()
            os.dup2(self._blank, self._spare, inheritable=False)

    def _close_spare(self) -> None:
        os.close(self._spare)
        os.close(self._blank)

    def close(self) -> None:
        self._close_spare()
        try:
            self._monitor.close()
        finally:
            self._router.close()


def advertised_host(options: ZeroMQOptions, bound: socket.socket) -> str:
    """The host that peers connect to.

    Raises:
        ConfigurationError: it was not said, and `bound` is on every interface.
    """
    host: str = bound.getsockname()[0]
    if options.advertise_host:
        return options.advertise_host
    if is_wildcard(host):
        raise ConfigurationError(
            f"listening on {host}, every interface: set advertise_host to the one that peers connect to",
            key="advertise_host",
            value="",
        )
    return host
