"""Leak guards around every test: what a test starts or opens is gone when it ends.

Fixtures of a wider scope are set up before the guards look, so what they hold is not counted.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.util import find_spec
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
import zmq

pytest.register_assert_rewrite(
    "kvferry.connector.handoff.testing", "kvferry.connector.testing", "kvferry.transports.testing"
)

if find_spec("hypothesis") is not None:  # the venv with vLLM does without
    import hypothesis

    # A busy machine is late with any example; what takes too long is ended by the test's own timeout.
    hypothesis.settings.register_profile("kvferry", deadline=None)
    hypothesis.settings.load_profile("kvferry")

#: For how long threads may finish and children may be reaped after the test's own tear-down.
GRACE_S = 10.0

#: Where shared memory has names.
SHARED = "/dev/shm/"


def _threads() -> set[str]:
    return {f"thread {thread.name} ({thread.ident})" for thread in threading.enumerate()}


def _descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"descriptor {name} -> {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:  # the one that listed the folder
            continue
    return found


def _children() -> set[str]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            pids = (task / "children").read_text().split()
        except OSError:  # the thread ended, or the kernel was built without the file
            continue
        found.update(f"child process {pid}" for pid in pids)
    return found


def _shared_memory() -> set[str]:
    """All that has a name, other programs' too."""
    return {f"{SHARED}{name}" for name in os.listdir(SHARED)} if os.path.isdir(SHARED) else set()


def _mapped_by_strangers() -> set[str]:
    """Files in /dev/shm that are mapped by processes which do not descend from this one."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpid() not in _ancestry(int(process.name)):
                lines = (process / "maps").read_text().splitlines()
                found |= {line.split(maxsplit=5)[5] for line in lines if SHARED in line}
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


def _abstract_sockets() -> set[str]:
    """Only this process's: another test run on the machine has its own pid in the name."""
    mark = f"@kvferry-{os.getpid()}-"
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {f"socket {line.rsplit(' ', 1)[-1]}" for line in lines if mark in line}


GUARDS: tuple[Callable[[], set[str]], ...] = (
    _threads,
    _descriptors,
    _children,
    _shared_memory,
    _abstract_sockets,
)


def _snapshot() -> set[str]:
    return set().union(*(guard() for guard in GUARDS))


def _left_since(before: set[str]) -> set[str]:
    """What is there now and was not before.

    Of shared memory nobody can tell whose it was once its maker has died. So none counts while other programs, which
    may die as well, have some there.
    """
    left = _snapshot() - before
    shared = {name for name in left if name.startswith(SHARED)}
    if shared and (any(name.startswith(SHARED) for name in before) or _mapped_by_strangers()):
        left -= shared
    return left


@pytest.fixture(scope="session", autouse=True)
def _resource_tracker() -> None:
    """Start multiprocessing's helper, which lives until the interpreter ends, before anyone counts."""
    resource_tracker.ensure_running()


@pytest.fixture(scope="session", autouse=True)
def _pyzmq_collector() -> None:
    """Start pyzmq's helper for sent memory, one for the whole process, before anyone counts."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as left, context.socket(zmq.PAIR) as right:
        left.bind("inproc://collector")
        right.connect("inproc://collector")
        left.send(bytes(zmq.COPY_THRESHOLD), copy=False)
        right.recv()


@pytest.fixture(autouse=True)
def nothing_is_left_behind(_resource_tracker: None) -> Iterator[None]:
    """Fail a test after which a thread, descriptor, child, shared memory or socket remains."""
    before = _snapshot()
    yield
    deadline = time.monotonic() + GRACE_S
    left = _left_since(before)
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
        left = _left_since(before)
    assert not left, f"left behind: {sorted(left)}"


@pytest.fixture
async def no_task_is_left_behind() -> AsyncIterator[None]:
    """Fail a test after which a task of its event loop still runs: closing the loop would cancel it unseen."""
    yield
    own = asyncio.current_task()
    deadline = time.monotonic() + GRACE_S
    while (left := asyncio.all_tasks() - {own}) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert not left, f"left behind: {left}"


@pytest.fixture(autouse=True)
def _tasks_are_checked(request: pytest.FixtureRequest, nothing_is_left_behind: None) -> None:
    if inspect.iscoroutinefunction(request.function):
        request.getfixturevalue("no_task_is_left_behind")
