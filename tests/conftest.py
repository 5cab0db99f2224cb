"""Settings of all tests.

Each test is checked for leaks; for a coroutine that includes the tasks of its event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import time
from collections.abc import AsyncIterator
from importlib.util import find_spec

import pytest

from tests.support.patience import SLOWNESS

pytest_plugins = ["kvferry.transports.testing.leaks", "pytester"]
if find_spec("xdist") is not None:  # the venv with vLLM has none
    pytest_plugins.append("tests.support.runs")

pytest.register_assert_rewrite(
    "tests.support.handoff_simulator", "kvferry.connector.testing", "kvferry.transports.testing"
)

if find_spec("hypothesis") is not None:  # the venv with vLLM has none
    import hypothesis

    # On a busy machine any example may be late. The timeout of the test ends what takes too long.
    hypothesis.settings.register_profile("kvferry", deadline=None)
    hypothesis.settings.load_profile("kvferry")


def pytest_configure(config: pytest.Config) -> None:
    """A run that is told to end, as by `timeout` or a stopped job, lists its failures so far, as it does
    after Ctrl-C.
    """
    # Not where the tests run, because processes that they fork would inherit the handler.
    if config.getoption("numprocesses", None):
        signal.signal(signal.SIGTERM, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test longer on a slow machine, unless the command line says how long."""
    if config.getoption("timeout", None) is not None:
        return
    for item in items:
        mark = item.get_closest_marker("timeout")
        limit_s = float(mark.args[0] if mark is not None else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(SLOWNESS * limit_s), append=False)


#: Seconds for which tasks may end after the test and its fixtures.
SETTLE_S = 10.0 * SLOWNESS


@pytest.fixture
async def no_task_is_left_behind() -> AsyncIterator[None]:
    """Fail a test after which a task of its event loop still runs.

    Closing the loop would cancel it silently.
    """
    yield
    own = asyncio.current_task()
    deadline = time.monotonic() + SETTLE_S
    while (left := asyncio.all_tasks() - {own}) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert not left, f"the test left tasks of its event loop behind: {left}"


@pytest.fixture(autouse=True)
def _tasks_are_checked(request: pytest.FixtureRequest, nothing_is_left_behind: None) -> None:
    if inspect.iscoroutinefunction(request.function):
        request.getfixturevalue("no_task_is_left_behind")
