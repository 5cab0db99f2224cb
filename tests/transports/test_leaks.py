"""The plug-in of the package names what a test left behind and where it came from."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing import shared_memory

import pytest

from kvferry.transports import Pool
from kvferry.transports.shm import SharedMemoryTransport
from kvferry.transports.testing import leaks
from kvferry.transports.testing.leaks import LeavesNothingBehind  # noqa: F401 - the inner suite derives from it

#: What the tests below left behind on purpose. The test that runs them cleans up.
LEFT = ExitStack()

#: Run by pytest in this process: each test leaves one kind of thing.
LEAKY = f"""
import sys
import pytest
here = sys.modules[{__name__!r}]

@pytest.mark.parametrize("kind", ["thread", "listener", "file", "child", "memory", "mapping"])
def test_that_leaves(kind):
    getattr(here, "leave_" + kind)()

def test_that_leaves_nothing():
    pass

def test_that_fails_with_memory_in_its_variables():
    transport, arena = here.mapped()
    transport.close()
    raise RuntimeError("fails on its own")

@pytest.fixture
def memory():
    transport, arena = here.mapped()
    yield arena
    transport.close()

def test_whose_fixture_returns_memory(memory):
    pass

def test_with_a_thread_that_ends_a_little_later():
    here.threading.Timer(0.1, int).start()
"""


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the inner tests wait less, and clean up after them."""
    monkeypatch.setattr(leaks, "SETTLE_S", 0.5)
    with LEFT:
        yield


def mapped() -> tuple[SharedMemoryTransport, object]:
    transport = SharedMemoryTransport()
    arena = transport.allocate(4096)
    transport.register(Pool([arena.segment]))
    return transport, arena


def leave_thread() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="copier")
    LEFT.callback(thread.join)
    LEFT.callback(stop.set)
    thread.start()


def leave_listener() -> None:
    LEFT.enter_context(socket.create_server(("127.0.0.1", 0)))
    unix = LEFT.enter_context(socket.socket(socket.AF_UNIX))
    unix.bind(f"\0kvferry-{os.getpid()}-left")
    unix.listen()


def leave_file() -> None:
    LEFT.callback(os.close, os.open(__file__, os.O_RDONLY))


def leave_child() -> None:
    child = LEFT.enter_context(
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    )
    LEFT.callback(child.kill)


def leave_memory() -> None:
    memory = shared_memory.SharedMemory(create=True, size=4096, name=f"kvferry-{os.getpid()}-left")
    LEFT.callback(memory.close)
    LEFT.callback(memory.unlink)


def leave_mapping() -> None:
    transport, arena = mapped()
    LEFT.callback(lambda arena: None, arena)
    transport.close()


def test_what_is_left_is_named(pytester: pytest.Pytester, left: None) -> None:
    pytester.makepyfile(LEAKY)
    result = pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", "-p", "no:asyncio", "-p", "kvferry.transports.testing.leaks"
    )
    result.assert_outcomes(passed=9, failed=1, errors=6)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_that_leaves?thread?*",
            "the test left something behind, still there 0.5 s after it ended; *",
            f"  thread 'copier', started at {__file__}:* in leave_thread, now at *",
            "*ERROR at teardown of test_that_leaves?listener?*",
            "  descriptor *: IPv4 listener at 127.0.0.1:*",
            f"  descriptor *: Unix listener at '@kvferry-{os.getpid()}-left'",
            "*ERROR at teardown of test_that_leaves?file?*",
            f"  descriptor *: {__file__}",
            "*ERROR at teardown of test_that_leaves?child?*",
            f"  child process *: '{sys.executable} -c input()'",
            "*ERROR at teardown of test_that_leaves?memory?*",
            f"  mapped memory '/dev/shm/kvferry-{os.getpid()}-left', 4096 bytes at 0x*",
            f"  shared memory '/dev/shm/kvferry-{os.getpid()}-left'",
            "*ERROR at teardown of test_that_leaves?mapping?*",
            "  mapped memory '/memfd:kvferry-arena', 4096 bytes at 0x*",
        ]
    )


def test_a_suite_checks_itself_where_the_plugin_is_not_loaded(pytester: pytest.Pytester, left: None) -> None:
    pytester.makepyfile(
        f"""
        import sys
        here = sys.modules[{__name__!r}]

        class TestSuite(here.LeavesNothingBehind):
            def test_that_leaves_a_thread(self):
                here.leave_thread()
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:asyncio")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["  thread 'copier', started at *"])
