"""The library: the one module that knows NIXL.

Nothing but the end of a NIXL agent ends a transfer that is in flight: releasing its handle, deregistering the
memory and removing the remote agent all return without an error, and bytes land afterwards. So `Agent.close`
drops every reference to the agent, and checks that none is left.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import mmap
import os
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from .._descriptors import Reserve
from .._memory import WORD_BYTES, address_of
from ..copying import load_word
from ..errors import BackendUnavailableError, ConfigurationError, PeerRefusedError, TransportError
from ..regions import AddressArray, Int64Array, MemoryKind
from .libnl import keep_libnl_apart
from .options import REMEDY, SCHEME, NIXLOptions

logger = logging.getLogger(__name__)

INSTALL: Final = (
    "`pip install nixl-cu12`, or `nixl-cu13` beside PyTorch for CUDA 13; either works without CUDA"
)

_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")

#: Descriptors of an agent and its connection: up to 10 of UCX's own, and TCP sockets.
PER_CONNECTION = 16

#: Held back, for the moments in which UCX aborts the process if it finds none. See `_descriptors`.
NUM_HELD = 32

#: How UCX treats the failure of a peer. `"peer"` is the safe one on networks, and shared memory does not have
#: it.
_ERROR_HANDLING = ("peer", "none")

_SEGMENT_TYPES: Final[Mapping[MemoryKind, str]] = {"host": "DRAM", "cuda": "VRAM"}

#: UCX and NIXL read these once per process. Every failure arrives as an error here, so they need not print
#: it.
_QUIET = {"UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}

_environment_lock = threading.Lock()

DescriptorArray = npt.NDArray[np.uint64]

T = TypeVar("T")


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a moment: UCX has no other way to learn its settings through NIXL."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _quiet() -> dict[str, str]:
    return {name: value for name, value in _QUIET.items() if name not in os.environ}


def _package() -> str:
    """Return the name of NIXL's package.

    If there are several, the one for PyTorch's CUDA is the right one.
    """
    installed = [name for name in _PACKAGES if find_spec(name) is not None]
    if not installed:
        raise BackendUnavailableError(f"transport {SCHEME!r} needs NIXL, which is not installed: {INSTALL}")
    version = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) or ""
    wanted = f"nixl_cu{version.partition('.')[0]}"
    return wanted if wanted in installed else installed[0]


@functools.cache
def _library() -> Any:
    """Import NIXL, and undo what its import changes in this process."""
    raises = logging.raiseExceptions
    package = _package()
    keep_libnl_apart()
    try:
        with _environment(_quiet()):
            library = importlib.import_module(package)
    except (ImportError, OSError, AttributeError) as error:
        raise BackendUnavailableError(
            f"transport {SCHEME!r} cannot import {package}: {error}; {INSTALL}"
        ) from error
    finally:
        logging.raiseExceptions = raises
    if "NIXL_LOG_LEVEL" not in os.environ:
        # Otherwise NIXL prints two lines per agent to standard output.
        logging.getLogger("nixl").setLevel(logging.CRITICAL)
    return library


def descriptors(
    addresses: AddressArray, lengths: Int64Array, device: int
) -> DescriptorArray | list[tuple[int, int, int]]:
    """Return regions as NIXL wants them, `(num_regions, 3)`: address, number of bytes, device."""
    if len(addresses) == 1:
        return [(int(addresses[0]), int(lengths[0]), device)]
    rows = np.empty((len(addresses), 3), dtype=np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = lengths
    rows[:, 2] = device
    return rows


@dataclass(frozen=True)
class Memory:
    """Memory that an agent registers, or regions of it.

    Attributes:
        rows: See `descriptors`. NIXL takes one row faster as a list.
    """

    kind: MemoryKind
    rows: DescriptorArray | list[tuple[int, int, int]]

    @classmethod
    def word(cls, address: int) -> Memory:
        """One word of main memory."""
        return cls("host", [(address, WORD_BYTES, 0)])

    @property
    def type(self) -> str:
        """NIXL's name of the kind."""
        return _SEGMENT_TYPES[self.kind]


class NIXL:
    """NIXL's side of this process: which backends and settings its agents have.

    While it is open, one agent without memory exists. UCX starts a thread with the first agent of a process
    and aborts if it finds no descriptor for it, so that must not happen for the sake of a peer.

    Attributes:
        mechanism: The backends, and the UCX transports that may move the bytes. NIXL does not report which
            one does.
    """

    def __init__(self, options: NIXLOptions) -> None:
        """Import NIXL, and try the settings.

        Raises:
            BackendUnavailableError: NIXL is not installed, or lacks a backend of the options.
            ConfigurationError: a backend has nothing here that fits the options.
            BackpressureError: there are not enough descriptors.
        """
        self.library: Final = _library()
        self.reserve: Final = Reserve(NUM_HELD)
        self._environment = options.environment()
        self._backends = options.backend_names
        self._error_handling = _ERROR_HANDLING[0]
        tls = self._environment.get("UCX_TLS", "")
        self.mechanism = f"{SCHEME}:{'+'.join(self._backends)}" + (f":{tls}" if tls else "")
        try:
            self._first = self._first_agent(options)
        except BaseException:
            self.reserve.close()
            raise

    def _first_agent(self, options: NIXLOptions) -> Agent:
        reason = ""
        for self._error_handling in _ERROR_HANDLING:
            try:
                return Agent(self, ())
            except TransportError as error:
                # UCX has no failure handling over shared memory. There a failed read is an error all the
                # same.
                reason = str(error)
        key = "refuse_tcp" if options.refuse_tcp else "tls"
        raise ConfigurationError(
            f"NIXL has nothing here that can be used with refuse_tcp={options.refuse_tcp} and {self._environment}: {reason}; "
            "UCX_LOG_LEVEL=info in the environment makes UCX print why; on a machine without RDMA allow TCP, or "
            "shared memory by tls='sm'",
            key=key,
            value=getattr(options, key),
        )

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Have UCX see the options while the body makes an agent."""
        with _environment(_quiet() | self._environment):
            yield

    def make(self) -> Any:
        """Make one of NIXL's agents with its backends. The environment is that of `settings`."""
        config = self.library.nixl_agent_config(
            enable_prog_thread=False, enable_listen_thread=False, backends=[]
        )
        agent = self.library.nixl_agent(uuid.uuid4().hex, config)
        for name in self._backends:
            if name not in agent.get_plugin_list():
                raise BackendUnavailableError(
                    f"backends={','.join(self._backends)!r}: NIXL has no backend {name!r} here; it has "
                    f"{', '.join(sorted(agent.get_plugin_list()))}"
                )
            agent.create_backend(
                name, {"ucx_error_handling_mode": self._error_handling} if name == "UCX" else {}
            )
        return agent

    def require_network(self) -> None:
        """See `Transport.require_network`.

        NIXL starts with UCX's failure handling only where UCX finds one.
        """
        if self._error_handling != _ERROR_HANDLING[0]:
            raise BackendUnavailableError(
                f"NIXL finds no network here that may be used with {self._environment}: is there an RDMA device, and does "
                "net_devices name it?"
            )

    def close(self) -> None:
        """Close the first agent. All others are closed."""
        self._first.close()
        self.reserve.close()


class Transfer:
    """A READ. Once it is posted, the memory is NIXL's until the READ is done, or its agent closed."""

    def __init__(self, agent: Agent, handle: Any) -> None:
        self._agent = agent
        self._handle = handle
        self._state = ""

    def start(self) -> None:
        """Post it, for the first time or again. Raises TransportError: see `Agent.read`."""
        self._state = self._agent.call("cannot begin a read", "transfer", self._handle)

    def is_done(self) -> bool:
        """Return whether all bytes are in place; let NIXL work if not.

        Raises:
            TransportError: it failed. Some of its bytes may still land until the agent is closed.
        """
        if self._state == "PROC":
            self._state = self._agent.call("cannot look at a read", "check_xfer_state", self._handle)
        if self._state == "PROC":
            return False
        if self._state != "DONE":
            raise TransportError("NIXL says that a read failed, but not why")
        return True

    def release(self) -> None:
        """Free what NIXL keeps for it. It is done, and is not posted again."""
        self._agent.call("cannot release a read", "release_xfer_handle", self._handle)
        self.drop()
        self._agent.forget(self)

    def drop(self) -> None:
        """Drop the handle. Of a transfer in flight this ends nothing."""
        self._handle = None


class Agent:
    """One of NIXL's agents, with the memory that it registered.

    Attributes:
        metadata: What a peer needs to read our memory through it.
    """

    def __init__(self, nixl: NIXL, memory: tuple[Memory, ...]) -> None:
        """Make an agent.

        Raises:
            BackpressureError: there are not enough descriptors. NIXL was not asked.
            BackendUnavailableError: NIXL lacks a backend.
            TransportError: NIXL cannot do it.
        """
        self._agent: Any = None
        self._transfers: set[Transfer] = set()
        self._pages: list[mmap.mmap] = []
        self._words: list[int] = []
        with nixl.reserve.lent(PER_CONNECTION, "cannot make a NIXL agent"), nixl.settings():
            self._agent, failure = _called(nixl.make)
            if failure is not None:
                raise TransportError(f"cannot make a NIXL agent: {failure}")
            # NIXL's own object, which each handle refers to as well.
            self._reference = weakref.ref(self._agent.agent)
            try:
                for part in memory:
                    self._register(part)
                self.metadata = bytes(self.call("cannot describe a NIXL agent", "get_agent_metadata"))
            except BaseException:
                self.close()
                raise

    def call(self, what: str, name: str, *args: Any) -> Any:
        """Call a method of NIXL's agent. Raises TransportError: it raised anything."""
        if self._agent is None:
            raise TransportError(f"{what}: the NIXL agent was destroyed")
        try:
            return getattr(self._agent, name)(*args)
        except Exception as error:  # noqa: BLE001 - see `_called`
            failure = _text_of(error)
        # A handle among them would keep NIXL's agent alive for as long as the traceback of the error exists.
        del args
        raise TransportError(f"{what}: {failure}")

    def _register(self, memory: Memory) -> None:
        rows = [(*map(int, row), "") for row in memory.rows]
        self.call(
            f"NIXL cannot register {len(rows)} segments of memory", "register_memory", rows, memory.type
        )

    def add(self, metadata: bytes) -> str:
        """Load a peer's metadata, and open a connection.

        Returns:
            The name of the peer's agent.

        Raises:
            PeerRefusedError: no route leads there, or NIXL does not understand the metadata.
        """
        try:
            name = self.call("cannot load the metadata of the peer's agent", "add_remote_agent", metadata)
        except TransportError as error:
            refusal = str(error)
        else:
            return str(name.decode() if isinstance(name, bytes) else name)
        raise PeerRefusedError(f"NIXL finds no route to the peer: {refusal}; {REMEDY}")

    def read(self, name: str, local: Memory, remote: Memory) -> Transfer:
        """Begin to copy regions of the peer's memory into ours.

        Raises:
            TransportError: NIXL refuses, because the peer is gone or has not registered that memory. Some
                bytes may still land until the agent is closed.
        """
        transfer = self.prepare(name, local, remote)
        transfer.start()
        return transfer

    def prepare(self, name: str, local: Memory, remote: Memory) -> Transfer:
        """Prepare to copy regions of the peer's memory into ours, once or many times. Raises: see `read`."""
        what = "cannot begin a read"
        sides = [
            self.call(what, "get_xfer_descs", local.rows, local.type),
            self.call(what, "get_xfer_descs", remote.rows, remote.type),
        ]
        transfer = Transfer(self, self.call(what, "initialize_xfer", "READ", *sides, name))
        self._transfers.add(transfer)
        return transfer

    def forget(self, transfer: Transfer) -> None:
        """Count a transfer as released."""
        self._transfers.discard(transfer)

    def progress(self) -> None:
        """Let NIXL work for peers that read from us over a path that is not one-sided; never blocks."""
        self.call("NIXL cannot work", "get_new_notifs")

    # -- words into which guards are read ----------------------------------------------------------------

    def take_word(self) -> int:
        """Return the address of a word that the agent has registered. `give_back_word` must follow."""
        if not self._words:
            page = mmap.mmap(-1, mmap.PAGESIZE)
            self._pages.append(page)
            first = address_of(page)
            self._register(Memory("host", [(first, mmap.PAGESIZE, 0)]))
            self._words.extend(range(first, first + mmap.PAGESIZE, WORD_BYTES))
        return self._words.pop()

    def load(self, address: int) -> int:
        """Return the value of a word. No READ that writes it is in flight."""
        return load_word(address)

    def give_back_word(self, address: int) -> None:
        """Let a word be taken again. Nothing writes it any more."""
        self._words.append(address)

    # -- the end -----------------------------------------------------------------------------------------

    @property
    def is_destroyed(self) -> bool:
        """Whether NIXL's agent no longer exists. Then nothing writes into our memory through it."""
        return self._reference() is None

    def close(self) -> None:
        """Destroy NIXL's agent, and with it all transfers and connections.

        Raises:
            TransportError: something still refers to it, so bytes may still land.
        """
        for transfer in self._transfers:
            transfer.drop()
        self._transfers.clear()
        self._agent = None
        if not self.is_destroyed:
            gc.collect()  # a traceback that someone keeps may refer to it in a cycle
        if not self.is_destroyed:
            raise TransportError("a NIXL agent was closed, and something still refers to it")
        self._pages.clear()


def _called(function: Callable[..., T], args: tuple[Any, ...] = ()) -> tuple[T, None] | tuple[None, str]:
    """Call something of NIXL's; return its result, or the text of whatever it raised.

    The original exception would keep NIXL's agent alive in its traceback, and with it every transfer.
    """
    try:
        return function(*args), None
    except BackendUnavailableError:
        raise
    except Exception as error:  # noqa: BLE001 - NIXL's own errors have no common base class
        return None, _text_of(error)


def _text_of(error: Exception) -> str:
    return str(error) or type(error).__name__
