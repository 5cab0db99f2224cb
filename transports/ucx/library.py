"""The library: the one module that knows `ucxx`.

Some things that `ucxx` does not offer are asked of UCX itself, which `ucxx` has loaded, above all what an
endpoint really uses, and the end of a worker. `ucxx` keeps a worker alive while one of its requests is
pending, and a receive whose sender died in the middle is pending forever. `Worker.close` ends such a worker
all the same, and with it every later write into our memory.

One fault of UCX decides when that may be. A send of large memory that is cut off gives up the memory's
registration. UCX tells the send's worker of it when the last send of any worker that uses the registration
has ended. It does not ask whether that worker still exists (`ucp_request_mem_invalidate_completion`, UCX
1.23). So a worker with such sends outlives them.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import time
import weakref
from typing import Any, Final

from .._descriptors import Reserve
from ..errors import (
    BackendUnavailableError,
    ConfigurationError,
    PeerLostError,
    PeerRefusedError,
    ProtocolError,
)
from ..outside import outside
from .options import REMEDY, SCHEME, UCXOptions

#: What `ucxx` is linked with. All other libraries of UCX are found through it.
_SONAME = "libucp.so.0"

_INSTALL = "`pip install ucxx-cu12`, or `ucxx-cu13` beside PyTorch for CUDA 13; either works without CUDA"

#: How often one call of `progress` asks UCX. Bounded, so that one busy peer cannot keep the loop to itself.
_MAX_PROGRESS = 64

_CLOSE_PERIOD_NS = 10**8
#: How long UCX may take to end what a forced close left behind. That needs no answer of the peer, so it is
#: short.
_FLUSH_S = 0.1
_MAX_LANES = 64
_EP_ATTR_FIELD_TRANSPORTS = 1 << 3
_STATUS_IN_PROGRESS = 1
_STATUS_TRUNCATED = -9
_MAX_STATUSES = 100  # a pointer that is an error is above `-_MAX_STATUSES`

#: Descriptors: for a context and its first worker, with UCX's own thread; and for a worker with its endpoint.
_PER_CONTEXT = 20
PER_CONNECTION = 8

#: Held back, twice what a connection takes. See `_descriptors`.
NUM_HELD = 16

#: The bits of an address's first byte that hold its version.
_VERSION_BITS = 0x0F


class _Lane(ctypes.Structure):
    """`ucp_transport_entry_t`"""

    _fields_ = [("transport", ctypes.c_char_p), ("device", ctypes.c_char_p)]


class _Lanes(ctypes.Structure):
    """`ucp_transports_t`"""

    _fields_ = [
        ("entries", ctypes.POINTER(_Lane)),
        ("num_entries", ctypes.c_uint),
        ("entry_size", ctypes.c_size_t),
    ]


class _EndpointAttributes(ctypes.Structure):
    """`ucp_ep_attr_t`"""

    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("local_sockaddr", ctypes.c_char * 128),
        ("remote_sockaddr", ctypes.c_char * 128),
        ("transports", _Lanes),
        ("user_data", ctypes.c_void_p),
    ]


class _MessageInfo(ctypes.Structure):
    """`ucp_tag_recv_info_t`"""

    _fields_ = [("sender_tag", ctypes.c_uint64), ("length", ctypes.c_size_t)]


#: `ucp_request_param_t`, or more, of zeros: no attribute is set.
_NoParameters = ctypes.c_char * 256


class _Library:
    """`ucxx`'s core, its array type, and UCX below it."""

    def __init__(self) -> None:
        self.core, self.array = _import_ucxx()
        self.ucp = ctypes.CDLL(_SONAME, mode=os.RTLD_NOLOAD)
        self.ucp.ucp_ep_query.argtypes = (ctypes.c_void_p, ctypes.POINTER(_EndpointAttributes))
        self.ucp.ucp_worker_get_efd.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        self.ucp.ucp_tag_probe_nb.argtypes = (
            ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int, ctypes.POINTER(_MessageInfo)
        )  # fmt: skip
        self.ucp.ucp_tag_probe_nb.restype = ctypes.c_void_p
        self.ucp.ucp_worker_flush_nbx.argtypes = (ctypes.c_void_p, ctypes.POINTER(_NoParameters))
        self.ucp.ucp_worker_flush_nbx.restype = ctypes.c_void_p
        self.ucp.ucp_request_check_status.argtypes = (ctypes.c_void_p,)
        for free in (self.ucp.ucp_worker_destroy, self.ucp.ucp_cleanup, self.ucp.ucp_request_free):
            free.argtypes = (ctypes.c_void_p,)
            free.restype = None
        # This and the next function are in libucs, which the loader finds through libucp.
        self.ucp.ucs_status_string.restype = ctypes.c_char_p
        if "UCX_LOG_LEVEL" not in os.environ:
            # Every failure arrives as an error, with its peer; UCX would write it to the terminal as well.
            self.ucp.ucs_global_opts_set_value(b"LOG_LEVEL", b"fatal")


def _import_ucxx() -> tuple[Any, Any]:
    """Import `ucxx`, and undo what it writes into the environment: each context gets its settings from us."""
    before = dict(os.environ)
    try:
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
    return libucxx, Array


@functools.cache
def _library() -> _Library:
    try:
        return _Library()
    except (ImportError, OSError, AttributeError) as error:
        raise BackendUnavailableError(f"transport {SCHEME!r} needs ucxx: {error}; {_INSTALL}") from error


class Operation:
    """A message that is being sent or received.

    The memory is UCX's until it is done, or its worker closed.
    """

    def __init__(self, request: Any, *, is_send: bool) -> None:
        self._request = request
        self.is_send: Final = is_send

    @property
    def is_done(self) -> bool:
        return self._request is None or bool(self._request.completed)

    def check(self) -> None:
        """Check how it ended, by its status: an exception of `ucxx` would keep the worker alive in its
        traceback.

        Raises:
            PeerLostError: the peer is gone.
            ProtocolError: it sent more than was asked for.
        """
        status = int(self._request.status)
        if status == _STATUS_TRUNCATED:
            raise ProtocolError("the peer sent more bytes than were asked for")
        if status:
            raise PeerLostError(f"UCX lost the peer: {_library().ucp.ucs_status_string(status).decode()}")

    def forget(self) -> None:
        """Drop the request. `ucxx` cancels it if it is not done."""
        self._request = None


class Context:
    """UCX's side of this process, for all of its peers: the devices, and a first worker that serves no peer.

    While that worker exists, UCX's own thread runs. UCX starts the thread with the first worker, and aborts
    the process if it finds no descriptor for it. So that must not happen for the sake of a connection.
    """

    def __init__(self, options: UCXOptions, reserve: Reserve) -> None:
        """Open the devices.

        Raises:
            BackendUnavailableError: `ucxx` cannot be imported.
            ConfigurationError: UCX refuses the settings, or has nothing that fits them.
            BackpressureError: there are not enough descriptors.
        """
        self.library: Final = _library()
        self.options: Final = options
        self.reserve: Final = reserve
        core = self.library.core
        with reserve.lent(_PER_CONTEXT, "cannot start UCX"):
            try:
                self.context: Any = core.UCXContext(
                    options.settings(), (core.Feature.TAG, core.Feature.WAKEUP)
                )
                self._first_worker: Any = core.UCXWorker(self.context)
            except (core.UCXError, RuntimeError) as error:
                raise ConfigurationError(f"UCX refuses {options.settings()}: {error}", key="tls") from error
        self._handle: Final = self.context.handle
        self._has_lost_worker = False
        self.workers: Final[set[Worker]] = set()  # that are not closed
        # Closed workers, and the operations of others that have to end before these do.
        self._closed: dict[Worker, list[Operation]] = {}

    def destroy(self, worker_handle: int) -> None:
        """End a worker that `ucxx` keeps alive.

        `ucxx` then keeps the context alive as well, until `close` ends it.
        """
        self.library.ucp.ucp_worker_destroy(worker_handle)
        self._has_lost_worker = True

    def bury(self, worker: Worker) -> None:
        """Keep a worker that has let go of everything until the operations that others have now are over.
        Whether they are is looked at when a worker is opened or closed.
        """
        self._closed[worker] = [each for other in self.workers for each in other.unfinished()]
        self.end_closed()

    def end_closed(self, *, at_once: bool = False) -> None:
        """End the closed workers that need not wait any longer."""
        for worker, awaited in list(self._closed.items()):
            if at_once or all(operation.is_done for operation in awaited):
                del self._closed[worker]
                worker.end()

    def close(self) -> None:
        """Close the devices. All other workers are closed."""
        self.end_closed(at_once=True)
        del self._first_worker, self.context
        if self._has_lost_worker:
            self.library.ucp.ucp_cleanup(self._handle)


class Worker:
    """UCX's side of one peer: a worker, and an endpoint once the peer's address is known.

    Each peer has its own, so that closing it is certain to end whatever the peer could still write into our
    memory.

    Attributes:
        address: What the other side connects to.
    """

    def __init__(self, context: Context) -> None:
        """Open a worker.

        Raises:
            BackpressureError: there are not enough descriptors. UCX was not asked.
            TransportError: UCX has none.
        """
        context.end_closed()  # first, because they have descriptors
        self._context = context
        self._library = context.library
        self._endpoint: Any = None
        self._operations: weakref.WeakSet[Operation] = weakref.WeakSet()
        what = "cannot open a UCX worker"
        with context.reserve.lent(PER_CONNECTION, what), outside(what):
            self._epoll = select.epoll()
            try:
                self._worker = self._library.core.UCXWorker(context.context)
                self._handle: Final = self._worker.handle
                self.address = bytes(memoryview(self._worker.address))
                self._descriptor = self._event_descriptor()
                self._epoll.register(self._descriptor, select.EPOLLIN)
            except BaseException:
                self._epoll.close()
                raise
        context.workers.add(self)

    def _event_descriptor(self) -> int:
        descriptor = ctypes.c_int()
        status = self._library.ucp.ucp_worker_get_efd(self._handle, ctypes.byref(descriptor))
        if status:
            raise BackendUnavailableError(f"UCX cannot be waited for here: status {status}")
        return descriptor.value

    def fileno(self) -> int:
        """A descriptor that is readable when `progress` has something to do, if `arm` returned True
        before.
        """
        return self._epoll.fileno()

    def connect(self, address: bytes) -> str:
        """Open an endpoint to a peer.

        Returns:
            What UCX chose, e.g. `"ucx:tcp"`.

        Raises:
            BackpressureError: there are not enough descriptors. UCX was not asked.
            PeerRefusedError: no transport leads there, or only TCP, which is refused; or it is not a UCX
                address.
            ProtocolError: the address is of another version; UCX would abort the process.
        """
        if address[0] & _VERSION_BITS != self.address[0] & _VERSION_BITS:
            raise ProtocolError("the peer's UCX address is of another version, or not a UCX address")
        core = self._library.core
        try:
            with self._context.reserve.lent(PER_CONNECTION, "cannot open a UCX endpoint"):
                remote = core.UCXAddress.create_from_buffer(address)
                # True: with error handling. Without it UCX aborts this process when the peer dies.
                self._endpoint = core.UCXEndpoint.create_from_worker_address(self._worker, remote, True)
        except (core.UCXError, RuntimeError) as error:
            raise PeerRefusedError(
                f"no UCX transport that survives a peer's death leads to the peer ({error}): {REMEDY}"
            ) from error
        return f"{SCHEME}:{'+'.join(self._transports())}"

    def _transports(self) -> list[str]:
        """The transports of the endpoint's lanes, each once, in UCX's order."""
        entries = (_Lane * _MAX_LANES)()
        lanes = _Lanes(entries, _MAX_LANES, ctypes.sizeof(_Lane))
        attributes = _EndpointAttributes(field_mask=_EP_ATTR_FIELD_TRANSPORTS, transports=lanes)
        if self._library.ucp.ucp_ep_query(self._endpoint.handle, ctypes.byref(attributes)):
            return ["unknown"]
        found = [entry.transport.decode() for entry in entries[: attributes.transports.num_entries]]
        return list(dict.fromkeys(found))

    def send(self, tag: int, address: int, num_bytes: int) -> Operation:
        """Send memory under a tag."""
        buffer = self._buffer(address, num_bytes)
        return self._started(self._endpoint.tag_send(buffer, self._library.core.UCXXTag(tag)), is_send=True)

    def receive(self, tag: int, address: int, num_bytes: int) -> Operation:
        """Receive into memory what comes under exactly this tag."""
        buffer = self._buffer(address, num_bytes)
        return self._started(self._worker.tag_recv(buffer, self._library.core.UCXXTag(tag)), is_send=False)

    def _buffer(self, address: int, num_bytes: int) -> Any:
        return self._library.array((ctypes.c_ubyte * num_bytes).from_address(address))

    def _started(self, request: Any, *, is_send: bool) -> Operation:
        operation = Operation(request, is_send=is_send)
        self._operations.add(operation)
        return operation

    def progress(self) -> bool:
        """Let UCX work; never blocks. Returns whether there was anything to do."""
        for count in range(_MAX_PROGRESS):
            if not self._worker.progress_once():
                return count > 0
        return True

    def arm(self) -> bool:
        """Have the descriptor report what happens from now on; False if something has happened already.

        After False, call `progress` before the next try.
        """
        return bool(self._worker.arm())

    def close(self) -> None:
        """Cut what is in flight and free everything.

        Afterwards nothing is written into our memory any more.
        """
        self._context.workers.remove(self)
        has_sends, has_ended = any(each.is_send for each in self.unfinished()), False
        try:
            has_ended = self._let_go()
        finally:
            # Where UCX could not end everything, only the end of the worker makes sure of our memory.
            if has_sends and has_ended:
                self._context.bury(self)
            else:
                self.end()

    def end(self) -> None:
        """End UCX's worker."""
        del self._worker
        if self._is_open():
            self._context.destroy(self._handle)
        self._epoll.close()

    def unfinished(self) -> list[Operation]:
        """Return what is being sent or received."""
        return [each for each in self._operations if not each.is_done]

    def _let_go(self) -> bool:
        """Cancel everything, and drop every reference to objects of `ucxx` except the worker, also local
        ones.

        A reference that is left would end the worker a second time when it is dropped.

        Returns:
            Whether UCX has ended everything.
        """
        if self._endpoint is not None:
            try:
                self._endpoint.close_blocking(_CLOSE_PERIOD_NS, 1)
            finally:
                self._endpoint = None
        for operation in self._operations:
            operation.forget()
        has_ended = self._flush()
        # `ucxx` ends a worker only after it has received every message that came unasked, and waits without a
        # deadline: for ever if the peer froze, or closed in the middle of one. So take them away, unread; UCX
        # frees them with the worker. There is no end of them only if UCX works in between, and from here on
        # nothing lets it.
        while self._library.ucp.ucp_tag_probe_nb(self._handle, 0, 0, True, ctypes.byref(_MessageInfo())):
            pass
        return has_ended

    def _flush(self) -> bool:
        """Let UCX end what the forced close of an endpoint left behind, and return whether it has.

        `ucp_worker_destroy` ends it too, but crashes in `ibv_modify_qp` if the endpoint was still being
        connected over `rc_verbs` (seen with the UCX of NIXL's wheel, 1.5.1).
        """
        ucp, deadline = self._library.ucp, time.monotonic() + _FLUSH_S
        self._worker.progress_once()
        request = ucp.ucp_worker_flush_nbx(self._handle, ctypes.byref(_NoParameters())) or 0
        if not 0 < request < 2**64 - _MAX_STATUSES:
            return not request
        while is_left := ucp.ucp_request_check_status(request) == _STATUS_IN_PROGRESS:
            if time.monotonic() >= deadline:
                break
            self._worker.progress_once()
        ucp.ucp_request_free(request)
        return not is_left

    def _is_open(self) -> bool:
        """Whether UCX's own worker still exists: then its descriptor is still the file that was
        registered.
        """
        try:
            self._epoll.modify(self._descriptor, select.EPOLLIN)
        except OSError:
            return False
        return True


def require_network(options: UCXOptions) -> str:
    """Try the settings, by connecting this process to itself.

    Returns:
        What UCX chose, as `Worker.connect` returns it.

    Raises:
        BackendUnavailableError: `ucxx` cannot be imported.
        ConfigurationError: UCX has no transport that fits `tls` and `net_devices`.
    """
    reserve = Reserve(NUM_HELD)
    try:
        context = Context(options, reserve)
        try:
            return _mechanism_to_itself(context)
        finally:
            context.close()
    finally:
        reserve.close()


def _mechanism_to_itself(context: Context) -> str:
    options = context.options
    worker = Worker(context)
    try:
        return worker.connect(worker.address)
    except PeerRefusedError as error:
        value = options.settings()
        raise ConfigurationError(
            f"tls={value}: UCX has nothing here that can be used: {error}", key="tls", value=value
        ) from error
    finally:
        worker.close()
