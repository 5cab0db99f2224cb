"""All sockets of an endpoint: opens them, waits for them, and closes them."""

from __future__ import annotations

import ctypes
import time
from functools import partial

import zmq

from .._descriptors import Reserve, descriptor_limit, warn_if_few
from ..errors import ConfigurationError
from ..limited_log import LimitedLog
from ..network import Found
from ..outside import outside, survived, typed
from ..streams import Poller
from .channel import Channel, Context, DialedChannel, Observer, Port
from .listener import Authenticator, Listener
from .options import SCHEME, Address, ZeroMQOptions
from .security import CurveKeys, Security

#: Descriptors of a connection that we make: an eventfd for each of its three sockets of libzmq (one of them
#: inside the monitor), and the TCP connection.
_PER_CONNECTION = 4

#: Descriptors that are held back. At most this many refused connections can be closing at a time.
_NUM_HELD = 8

#: The threads of libzmq that move bytes.
_NUM_THREADS = 1

#: libzmq does not reliably signal that a peer's queue has room again. While messages are queued here, look
#: this often.
_RETRY_S = 0.002

#: How long to pause if waiting fails, so that the owner's loop does not spin.
_REST_S = 0.01

#: The largest block that raises the thresholds of glibc, less what it adds itself.
_LARGEST_BLOCK_BYTES = (32 << 20) - (64 << 10)


class Sockets:
    """Opens connections, and reports to the observer what arrives over them.

    Args:
        poller: Waits for the sockets; its owner closes it.
    """

    def __init__(
        self,
        options: ZeroMQOptions,
        security: Security,
        poller: Poller,
        observer: Observer,
        log: LimitedLog,
    ) -> None:
        self._options = options
        self._security = security
        self._poller = poller
        self._observer = observer
        self._log = log
        warn_if_few(SCHEME, _NUM_HELD, options.max_connecting, _PER_CONNECTION)
        _let_malloc_keep_messages()
        self._reserve = Reserve(_NUM_HELD)
        self._context = self._make_context()
        self._authenticator: Authenticator | None = None
        self._ports: set[Port] = set()
        # Ports that may have something to pump: their descriptor was reported, or we called their sockets.
        self._active: dict[Port, None] = {}
        self._congested: set[Channel] = set()

    def _make_context(self) -> Context:
        """Make a context whose threads are running.

        libzmq starts them with the first socket, and aborts the process if it has no descriptor for one of
        them. So open that socket here, where the reserve lends enough.
        """
        context: Context = zmq.Context(io_threads=_NUM_THREADS)
        try:
            # Each socket takes at least one descriptor, so the limit of descriptors is then the only limit.
            context.set(zmq.MAX_SOCKETS, max(1023, min(descriptor_limit(), context.get(zmq.SOCKET_LIMIT))))
            with self._reserve.lent(2 * _NUM_THREADS + 6, "cannot start libzmq"):
                context.socket(zmq.PAIR).close()
        except BaseException:
            context.destroy(linger=0)
            self._reserve.close()
            raise
        return context

    # -- connections -----------------------------------------------------------------------------------

    def listen(self, host: str, ports: range) -> str:
        """Accept peers on the first free port; return the address to give to them.

        Raises:
            ConfigurationError: see `NetworkOptions.listen` and `Security.for_listening`. Nothing is open.
        """
        bound, where = self._options.listen(host, ports)
        try:
            keys = self._security.for_listening(bound.getsockname()[0])
            server_key = keys.public_bytes if keys is not None else b""
            address = Address(where.host, where.port, server_key)
            with outside(f"cannot listen on {address}", ConfigurationError):
                if keys is not None and self._authenticator is None:
                    self._authenticator = Authenticator(self._context, keys.allowed, self._log)
                    self._add(self._authenticator)
                listener = Listener(
                    *(self._context, bound, keys, self._options),
                    *(self._reserve, self._observer, self._on_used, self._log),
                )
                self._add(listener)
        except BaseException:
            bound.close()
            raise
        return str(address)

    def dial(self, address: Address, found: Found, keys: CurveKeys | None) -> DialedChannel:
        """Begin to connect.

        Raises:
            BackpressureError: there are no descriptors, or no sockets of libzmq's, for another connection.
            TransportError: libzmq does not connect there.
        """
        what = f"cannot connect to {address.authority}"
        # libzmq opens the connection later, and does not report that it found no descriptor for it.
        self._reserve.require(_PER_CONNECTION, what)
        try:
            channel = DialedChannel(
                *(self._context, address, found, keys, self._options),
                *(self._observer, self._on_used),
            )
        except Exception as error:
            # libzmq reports too many sockets by the errno that also means a lack of descriptors.
            limit = f"or libzmq's limit of {self._context.get(zmq.MAX_SOCKETS)} sockets"
            raise typed(error, what, limit=limit) from error
        try:
            self._add(channel)
        except Exception as error:
            self.hang_up(channel)
            raise typed(error, what) from error
        return channel

    def _add(self, port: Port) -> None:
        self._ports.add(port)
        # It was called while it was set up, so look at it once before its descriptors are relied on.
        self._activate(port)
        for watched in port.sockets:
            self._poller.watch(watched, partial(self._activate, port))

    def hang_up(self, channel: Channel) -> None:
        """Close one connection."""
        self._congested.discard(channel)
        if isinstance(channel, DialedChannel) and channel in self._ports:
            self._ports.remove(channel)
            self._active.pop(channel, None)
            for watched in channel.sockets:
                with survived("cannot stop waiting for a connection", self._log):
                    self._poller.unwatch(watched)
        with survived("cannot close a connection", self._log):
            channel.hang_up()
        # To hang up on an accepted connection its listener reads its monitor, and that may have reported the
        # end of other connections as well. The next `pump` passes it on.
        self._activate(channel.port)

    # -- the loop --------------------------------------------------------------------------------------

    def _activate(self, port: Port) -> None:
        if port in self._ports:  # it may have been closed since
            self._active[port] = None

    def _on_used(self, channel: Channel) -> None:
        self._activate(channel.port)
        if channel.is_congested:
            self._congested.add(channel)
        else:
            self._congested.discard(channel)

    def wait(self, timeout_s: float) -> None:
        """Wait until something happens, at most `timeout_s`, and report it.

        Call `pump` first: sockets that were used since they were last pumped report nothing that happened
        before. The cost does not depend on the number of connections, only on the number of those with
        something to do.
        """
        if self._active:
            timeout_s = 0.0
        elif self._congested:
            timeout_s = min(timeout_s, _RETRY_S)
        try:
            self._poller.poll(timeout_s)
        except Exception as error:  # noqa: BLE001 - the owner's loop goes on
            self._log.warning("cannot wait for ZeroMQ's sockets: %r", error, exc_info=error)
            time.sleep(min(max(timeout_s, 0.0), _REST_S))
        self.pump()
        for channel in list(self._congested):
            channel.flush()

    def pump(self) -> None:
        """Report what has arrived at the ports that were used or reported; never blocks."""
        for port in list(self._active):
            try:
                if not port.pump():
                    self._active.pop(port, None)
            except Exception as error:  # noqa: BLE001 - it costs at most one connection
                # The port stays active: what it has not taken is not reported again.
                if isinstance(port, Channel):
                    self._observer.on_lost(port, error)
                else:
                    self._log.warning("%s: %r", port.failure, error, exc_info=error)

    def close(self) -> None:
        """Close everything. Takes no longer than libzmq's linger period, whatever the peers do."""
        for port in self._ports:
            with survived("cannot close a connection cleanly", self._log):
                port.close()
        self._ports.clear()
        self._active.clear()
        self._congested.clear()
        # Closes what could not be closed before: an open socket would keep the context from ever terminating.
        self._context.destroy(linger=0)
        self._reserve.close()


def _let_malloc_keep_messages() -> None:
    """Make glibc keep freed messages.

    Returning pages to the system and getting new ones costs as much as a copy.

    glibc decides how much freed memory it keeps by the largest block that was freed so far. With another C
    library this has no effect.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = (ctypes.c_void_p,)
    libc.free(libc.malloc(ctypes.c_size_t(_LARGEST_BLOCK_BYTES)))
