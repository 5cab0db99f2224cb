"""Accepted connections: one ROUTER socket for all of them, which distinguishes them by libzmq's routing ids.

A ROUTER neither reports the end of a connection nor can it close one. So both go by the file descriptor of
the connection: libzmq's monitor reports it when a connection begins and ends, and every message carries it.
If we shut the connection down by its descriptor, libzmq sees it end, and the peer notices at once.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils import z85

from .._descriptors import Reserve, remedy
from ..errors import PeerLostError
from ..limited_log import LimitedLog
from .channel import (
    RECEIVE_BATCH,
    Channel,
    Context,
    Monitor,
    Observer,
    Parts,
    Port,
    Torn,
    configure,
    offer,
    receive,
)
from .frames import Frame
from .options import Address, ZeroMQOptions
from .security import ZAP_DOMAIN, CurveKeys

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"


class AcceptedChannel(Channel):
    """A connection that a peer opened.

    Attributes:
        routing_id: Its id at the ROUTER. None until its first message has arrived.
    """

    def __init__(
        self, listener: Listener, descriptor: int, observer: Observer, on_used: Callable[[Channel], None]
    ) -> None:
        super().__init__(observer, on_used, is_encrypted=listener.is_encrypted)
        self.descriptor: Final = descriptor
        self.routing_id: bytes | None = None
        self._listener = listener

    @property
    def port(self) -> Port:
        return self._listener

    def _offer(self, parts: Parts) -> bool:
        assert self.routing_id is not None, "a peer is answered after its first message"
        return self._listener.offer(self.routing_id, parts)

    def _hang_up(self) -> None:
        self._listener.hang_up(self)


class Listener(Port):
    """Accepts peers on one port. The module explains how.

    Args:
        bound: A listening socket. The listener owns it as soon as it is made.
        reserve: Descriptors that are kept so that connections can still be refused when no others are left.
        on_used: See `Channel`.
    """

    failure = "cannot receive from accepted peers"

    def __init__(
        self,
        context: Context,
        bound: socket.socket,
        keys: CurveKeys | None,
        options: ZeroMQOptions,
        reserve: Reserve,
        observer: Observer,
        on_used: Callable[[Channel], None],
        log: LimitedLog,
    ) -> None:
        self.is_encrypted = keys is not None
        self._port: int = bound.getsockname()[1]
        self._reserve = reserve
        self._observer = observer
        self._on_used = on_used
        self._log = log
        # By descriptor, usually one each. If a descriptor was reused before the messages of its first
        # connection were received, the two connections cannot be distinguished, and both end with the second.
        self._connections: dict[int, list[AcceptedChannel]] = {}
        self._channels: dict[bytes, AcceptedChannel] = {}  # by routing id, including those that we hung up on
        self._gone: deque[AcceptedChannel] = deque()
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
            if keys is not None:
                keys.protect_server(self._router)
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

    def pump(self) -> bool:
        self._watch()
        for _ in range(RECEIVE_BATCH):
            try:
                frames = receive(self._router)
            except Torn as error:
                self._lose_torn(error)
                continue
            if frames is None:
                break
            channel = self._channel_of(frames[0])
            if channel is not None:
                self._observer.on_message(channel, frames[1:])
        else:
            return True
        # Only when no message is left: what a peer sent before it left still counts.
        while self._gone:
            channel = self._gone.popleft()
            if channel.routing_id is not None:
                self._channels.pop(channel.routing_id, None)
            self._observer.on_lost(channel, PeerLostError("the peer's connection is gone"))
        return False

    def _lose_torn(self, torn: Torn) -> None:
        """Lose the peer whose message was lost, because it would wait for an answer in vain."""
        channel = self._channel_of(torn.frames[0])
        if channel is not None:
            self._observer.on_lost(channel, torn)

    def _watch(self) -> None:
        for event, value in self._monitor.take():
            if event == zmq.EVENT_ACCEPTED:
                self._on_accepted(value)
            elif event == zmq.EVENT_ACCEPT_FAILED:
                # Out of descriptors. The kernel keeps reporting the pending connection, and libzmq's thread
                # would retry in a busy loop. Free a descriptor of the reserve: libzmq accepts the connection,
                # and we refuse it.
                self._reserve.spend()
            elif event == zmq.EVENT_DISCONNECTED:
                self._gone.extend(self._connections.pop(value, ()))

    def _on_accepted(self, descriptor: int) -> None:
        if self._reserve.refill():
            self._add(descriptor)
        else:
            self._log.warning("refused a connection: no file descriptors are left; %s", remedy())
            self._shut_down(descriptor)

    def _add(self, descriptor: int) -> AcceptedChannel:
        channel = AcceptedChannel(self, descriptor, self._observer, self._on_used)
        # Entered first: to make room for it the observer may hang up on another one, which reads the monitor
        # again.
        self._connections.setdefault(descriptor, []).append(channel)
        self._observer.on_accepted(channel)
        return channel

    def _channel_of(self, frame: Frame) -> AcceptedChannel | None:
        """Return the channel of a message with this first frame; None if its connection was refused or is
        gone.
        """
        routing_id = bytes(frame)
        known = self._channels.get(routing_id)
        if known is not None:
            return known
        # Descriptors are reused, but the monitor reported this connection before its message came.
        self._watch()
        # libzmq does not know the descriptor if the peer speaks ZMTP from before 2013. We treat that peer as
        # silent.
        descriptor = frame.descriptor
        connections = self._connections.get(descriptor)
        if connections is None:
            return None
        channel = connections[0] if connections[0].routing_id is None else self._add(descriptor)
        channel.routing_id = routing_id
        self._channels[routing_id] = channel
        return channel

    def offer(self, routing_id: bytes, parts: Parts) -> bool:
        """Send to one peer. Returns False if its queue is full."""
        return offer(self._router, [routing_id, *parts])

    def hang_up(self, channel: AcceptedChannel) -> None:
        """Shut a connection down. The monitor reports its end later."""
        # First look whether it is gone: its descriptor may belong to another connection by now.
        self._watch()
        if channel in self._connections.get(channel.descriptor, ()):
            self._shut_down(channel.descriptor)

    def _shut_down(self, descriptor: int) -> None:
        # By a descriptor that is kept for this: connections have to be closed above all when no other is
        # left.
        try:
            os.dup2(descriptor, self._spare, inheritable=False)
            connection = socket.socket(fileno=self._spare)
        except OSError:
            return
        try:
            # libzmq may have closed it just now, and the number may belong to another file already.
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


class Authenticator(Port):
    """Answers libzmq's requests to admit a peer (ZAP, ZeroMQ RFC 27), in the owner's loop.

    Until it answers, the peer's handshake waits; a peer that is not allowed gets a refusal and nothing else.
    """

    failure = "cannot answer which peers may connect"

    def __init__(self, context: Context, allowed: frozenset[bytes], log: LimitedLog) -> None:
        self._allowed = allowed
        self._log = log
        self._socket = context.socket(zmq.REP)
        try:
            self._socket.linger = 0
            self._socket.bind(_ZAP_ENDPOINT)
        except BaseException:
            self._socket.close()
            raise
        self.sockets = (self._socket,)

    def pump(self) -> bool:
        while self._socket.poll(0):
            version, request_id, domain, address, _, mechanism, *credentials = self._socket.recv_multipart()
            is_allowed = mechanism == b"CURVE" and domain == ZAP_DOMAIN and self._knows(credentials)
            if not is_allowed:
                self._log.warning("refused a peer from %s: its CURVE key is not allowed", address.decode())
            status = (b"200", b"OK") if is_allowed else (b"400", b"this key is not allowed")
            self._socket.send_multipart([version, request_id, *status, b"", b""])
        return False

    def _knows(self, credentials: list[bytes]) -> bool:
        return (
            len(credentials) == 1
            and len(credentials[0]) == 32
            and z85.encode(credentials[0]) in self._allowed
        )

    def close(self) -> None:
        self._socket.close()
