"""A pytest plug-in: a test fails if anything that it started or opened remains after it.

    pytest_plugins = ["kvferry.transports.testing.leaks"]   # in the top conftest.py of your tests

It looks for threads, descriptors, child processes, shared memory, mapped memory and sockets. What existed
before the test does not count, so fixtures of a wider scope may hold what they like. The conformance suites
check their own tests like this even if the plug-in is not loaded.

Some things end a little after the call that ends them: a thread leaves its last function, the kernel reaps a
child. So the check waits until nothing is left, for `SETTLE_S` seconds at most. A test that leaves nothing
does not wait.
"""

from __future__ import annotations

import functools
import gc
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import pytest
import zmq

#: Seconds for which threads may finish and children may be reaped after the test and its fixtures.
SETTLE_S = 10.0

#: Where shared memory has names.
_SHM = "/dev/shm/"

#: How the paths of mapped shared memory begin in /proc/PID/maps. Other files count as descriptors only:
#: libraries keep code and model files mapped for as long as the process lives.
_MAPPED = ("/memfd:", _SHM, "/SYSV")

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class LeakCheck:
    """One kind of thing that may be left.

    Attributes:
        find: Return an identity of each one that exists now.
        describe: Say what it is and where it came from, as far as that can be known. None: it has ended
            meanwhile.
    """

    find: Callable[[], Iterable[Any]]
    describe: Callable[[Any], str | None]


# == threads =======================================================================================

#: Where each thread was started, for those that were started during a check.
_started_at: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()


def _threads() -> list[int | None]:
    return [thread.native_id for thread in threading.enumerate()]


def _describe_thread(native_id: int | None) -> str | None:
    for thread in threading.enumerate():
        if thread.native_id == native_id:
            frame = sys._current_frames().get(thread.ident or 0)
            parts = [f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}"]
            if thread in _started_at:
                parts.append(f"started at {_started_at[thread]}")
            if frame is not None:
                parts.append(f"now at {place_of(frame)}")
            return ", ".join(parts)
    return None


def place_of(frame: FrameType) -> str:
    """Return file, line and function of the nearest call that is not in the standard library."""
    library = sysconfig.get_path("stdlib")
    at: FrameType | None = frame
    while at is not None:
        file = at.f_code.co_filename
        if not file.startswith((library, "<frozen")) or "site-packages" in file:
            break
        at = at.f_back
    at = at or frame
    return f"{at.f_code.co_filename}:{at.f_lineno} in {at.f_code.co_name}"


@contextmanager
def _starts_are_recorded() -> Iterator[None]:
    start = threading.Thread.start

    @functools.wraps(start)
    def start_and_record(thread: threading.Thread) -> None:
        _started_at.setdefault(thread, place_of(sys._getframe(1)))  # nested checks record each thread once
        start(thread)

    threading.Thread.start = start_and_record  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]


# == descriptors, listeners and other sockets ======================================================


def descriptors() -> list[tuple[int, str]]:
    """Return the open descriptors of this process, each with what it refers to."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append((int(name), _same_path(os.readlink(f"/proc/self/fd/{name}"))))
        except FileNotFoundError:  # the descriptor that listed the folder
            continue
    return found


def _same_path(path: str) -> str:
    """Return a path as it was before its file was deleted, because that makes it no other file."""
    return path.removesuffix(" (deleted)")


def _describe_descriptor(identity: tuple[int, str]) -> str | None:
    number, target = identity
    if not target.startswith("socket:"):
        return f"descriptor {number}: {target}"
    try:
        with socket.socket(fileno=os.dup(number)) as copy:
            return f"descriptor {number}: {_describe_socket(copy)}"
    except OSError:
        return f"descriptor {number}: {target}"


def _describe_socket(sock: socket.socket) -> str:
    kind = {socket.AF_UNIX: "Unix", socket.AF_INET: "IPv4", socket.AF_INET6: "IPv6"}.get(sock.family, "")
    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return f"{kind} listener at {_address(sock.getsockname())}"
    try:
        return f"{kind} socket at {_address(sock.getsockname())}, connected to {_address(sock.getpeername())}"
    except OSError:
        return f"{kind} socket at {_address(sock.getsockname())}, not connected"


def _address(name: Any) -> str:
    if isinstance(name, tuple):
        return f"{name[0]}:{name[1]}"
    text = os.fsdecode(name).replace("\0", "@", 1)
    return repr(text) if text else "no address"


def _abstract_sockets() -> list[str]:
    """Those of this process and of children that it forgot: its process id is in their names."""
    mark = f"@kvferry-{os.getpid()}-"
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line.rsplit(" ", 1)[-1] for line in lines if mark in line]


# == child processes ===============================================================================


def _children() -> list[int]:
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += map(int, (task / "children").read_text().split())
        except OSError:  # the thread ended, or the kernel was built without the file
            continue
    return found


def _describe_child(pid: int) -> str | None:
    try:
        command = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        )
    except OSError:
        return None
    return (
        f"child process {pid}: {command[:200]!r}"
        if command
        else f"child process {pid}: ended, but not waited for"
    )


# == shared and mapped memory ======================================================================


def _shared_memory() -> set[str]:
    """All shared memory that has a name, that of other programs as well."""
    return {f"{_SHM}{name}" for name in os.listdir(_SHM)} if os.path.isdir(_SHM) else set()


def _mapped_by_strangers() -> set[str]:
    """Files in /dev/shm that are mapped by processes which do not descend from this one."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpid() not in _ancestry(int(process.name)):
                lines = (process / "maps").read_text().splitlines()
                found |= {line.split(maxsplit=5)[5] for line in lines if _SHM in line}
        except OSError:  # it ended meanwhile, or is not ours to look into
            continue
    return found


def _ancestry(pid: int) -> list[int]:
    """The process, its parent, and so on."""
    line = [pid]
    while line[-1] > 1:
        stat = Path(f"/proc/{line[-1]}/stat").read_text()
        line.append(int(stat.rpartition(")")[2].split()[1]))
    return line


def _mapped_memory() -> list[tuple[str, str, str]]:
    """Shared memory that is mapped here: addresses, inode, path."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if any(mark in line for mark in _MAPPED):
            addresses, _, _, _, inode, path = line.split(maxsplit=5)
            if path.startswith(_MAPPED):
                found.append((addresses, inode, _same_path(path)))
    return found


def _describe_mapping(identity: tuple[str, str, str]) -> str:
    addresses, _, path = identity
    begin, end = (int(address, 16) for address in addresses.split("-"))
    return f"mapped memory {path!r}, {end - begin} bytes at {begin:#x}"


# == the check =====================================================================================

#: What is checked. Add a row to check for more.
LEAK_CHECKS: Mapping[str, LeakCheck] = {
    "threads": LeakCheck(_threads, _describe_thread),
    "descriptors": LeakCheck(descriptors, _describe_descriptor),
    "child processes": LeakCheck(_children, _describe_child),
    "shared memory": LeakCheck(_shared_memory, lambda name: f"shared memory {name!r}"),
    "mapped memory": LeakCheck(_mapped_memory, _describe_mapping),
    "abstract sockets": LeakCheck(_abstract_sockets, lambda name: f"socket {name!r}"),
}

Found = dict[str, set[Any]]


def _find() -> Found:
    return {name: set(check.find()) for name, check in LEAK_CHECKS.items()}


def _left_since(before: Found, *, after_failure: bool) -> Found:
    left = {name: found - before[name] for name, found in _find().items()}
    if after_failure:
        # pytest keeps the frames of a failed test, and with them the memory that its variables refer to.
        left["mapped memory"].clear()
        left["descriptors"] = {found for found in left["descriptors"] if not found[1].startswith(_MAPPED)}
    unknown = left["shared memory"] - {path for _, _, path in _mapped_memory()}
    # Nothing says whose a name is once its maker has died. So while other programs, which may die as well,
    # have shared memory, only what this process has mapped counts.
    if unknown and (before["shared memory"] or _mapped_by_strangers()):
        left["shared memory"] -= unknown
    return left


@functools.cache
def _start_helpers() -> None:
    """Start helpers of libraries that live as long as the process, so that they are not counted."""
    resource_tracker.ensure_running()
    # pyzmq starts a thread and a socket when it first sends memory without a copy.
    with zmq.Context() as context, context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        left.bind("inproc://kvferry-leaks")
        right.connect("inproc://kvferry-leaks")
        left.send(bytes(zmq.COPY_THRESHOLD), copy=False)
        right.recv()


class Leaks:
    """What exists when this is created, to tell later what was left since."""

    def __init__(self) -> None:
        _start_helpers()
        self._before = _find()

    def wait(self, settle_s: float, *, after_failure: bool = False) -> list[str]:
        """Wait until nothing is left, for at most `settle_s` seconds; return a description of each thing that
        is.

        Args:
            after_failure: Do not count memory, because the traceback of the failure may refer to it.
        """
        deadline = time.monotonic() + settle_s
        pause_s = 0.001
        while found := [
            text
            for name, left in _left_since(self._before, after_failure=after_failure).items()
            for identity in left
            if (text := LEAK_CHECKS[name].describe(identity)) is not None
        ]:
            if time.monotonic() >= deadline:
                return sorted(found)
            gc.collect()  # what is left may be part of a cycle that nothing refers to
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
        return []


def pytest_collection_finish() -> None:
    """Exempt what the imported modules hold from collections, each of which would visit it: up to 0.4 s per
    test.
    """
    if not gc.get_freeze_count():  # what a session within a test imports ends with that test
        gc.collect()
        gc.freeze()


def _checked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Watch what runs until the generator is resumed, and fail the test if something is left."""
    num_failed = request.session.testsfailed
    logging_plugin: Any = request.config.pluginmanager.get_plugin("logging-plugin")
    log: pytest.LogCaptureFixture | None = request.getfixturevalue("caplog") if logging_plugin else None
    with _starts_are_recorded():
        leaks = Leaks()
        yield
        # The test is over, and so are the fixtures that it asked for. pytest still holds what they returned,
        # and errors that were logged, whose tracebacks hold variables. Neither must keep memory mapped.
        request.node.funcargs.clear()
        if log is not None:
            for phase in ("setup", "call", "teardown"):
                log.get_records(phase).clear()
            logging_plugin.report_handler.records.clear()
        has_failed = request.session.testsfailed > num_failed or hasattr(sys, "last_value")
        left = leaks.wait(SETTLE_S, after_failure=has_failed)
    if left:
        pytest.fail(
            f"the test left something behind, still there {SETTLE_S:g} s after it ended; close, join or unmap it in "
            "close() or in the test's tear-down:\n" + "\n".join(f"  {text}" for text in left),
            pytrace=False,
        )


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, descriptor, child process, memory or socket."""
    yield from _checked(request)


class LeavesNothingBehind:
    """Base of a suite whose tests are checked even if the plug-in is not loaded.

    If it is, they are checked once.
    """

    # The name is that of the plug-in's fixture, so this one takes its place.
    @pytest.fixture(autouse=True)
    def nothing_is_left_behind(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Fail a test that leaves a thread, descriptor, child process, memory or socket."""
        yield from _checked(request)
