"""`TransportConformance`: all promises of a transport in one test class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from .. import _memory
from ..base import Transport
from ..copying import load_word
from ..regions import Guard
from .harness import DEADLINE_S, HELD, POOL_BYTES, Link, World
from .leaks import LeavesNothingBehind
from .peers import ConnectRaw, LoopPromises, MessagePromises, PeerPromises
from .reads import GuardPromises, MemoryPromises, OnGuardCheck, OwnershipPromises, ReadPromises, ReadUnchecked

Create = Callable[[Mapping[str, object]], Transport]


class TransportConformance(
    MemoryPromises,
    ReadPromises,
    OwnershipPromises,
    GuardPromises,
    MessagePromises,
    PeerPromises,
    LoopPromises,
    LeavesNothingBehind,
):
    """All promises of a transport. Derive from it, and override the fixture `create`.

    Some tests need help from the author of the transport: a *capability*. Each is a fixture to override. If a
    suite does not declare one, the tests that need it are left out, and one skipped test names all that is
    missing. Set a fixture to None if the transport cannot have it: then nothing is said about it. If a
    fixture returns None, the tests that need it are skipped.

    | fixture | returns |
    |---|---|
    | `read_unchecked` | a function that asks the owner of memory for `(link, remote_offset, num_bytes, guard)` without \
checking them, as a hostile peer would. Not for one-sided transports, whose owners see no reads |
    | `connect_raw` | a function that connects a socket to an address, for bytes that are no protocol |
    """

    #: Seconds to wait for what should happen at once. Generous, because the machine may be busy.
    deadline_s: ClassVar[float] = DEADLINE_S

    @pytest.fixture
    def create(self) -> Create:
        """Return what makes a transport from its options: its class, or a function."""
        raise NotImplementedError(
            "cannot run TransportConformance: it has no transport; override the fixture `create`"
        )

    @pytest.fixture
    def world(self, create: Create) -> Iterator[World]:
        """Return a world without nodes; it closes its nodes after the test."""
        world = World(lambda: create({}), deadline_s=self.deadline_s)
        yield world
        world.close()

    @pytest.fixture
    def link(self, world: World) -> Link:
        """Return two connected nodes with pools of `POOL_BYTES` bytes. The producer's guard `HELD` holds."""
        link = world.pair(POOL_BYTES)
        link.producer.transport.guards.set(HELD.index, HELD.value)
        return link

    # -- capabilities ----------------------------------------------------------------------------------

    @pytest.fixture
    def on_guard_check(self) -> OnGuardCheck:
        """Return a context manager that calls a function after each check in which a guard held.

        This one sees every check by `WordTable.holds` or `guard_holds`. Override it if the transport has
        another way.
        """
        return _after_checks

    @pytest.fixture
    def read_unchecked(self) -> ReadUnchecked:
        """See the class."""
        raise NotImplementedError

    @pytest.fixture
    def connect_raw(self) -> ConnectRaw:
        """See the class."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def capabilities_are_there(self, request: pytest.FixtureRequest) -> None:
        """Skip a test that needs a capability whose fixture returns None."""
        for name in _CAPABILITIES:
            if name in request.fixturenames and request.getfixturevalue(name) is None:
                pytest.skip(f"{type(self).__name__}: this test needs `{name}`, and the fixture returned None")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Leave out the tests whose capabilities are not declared."""
        super().__init_subclass__(**kwargs)
        missing: dict[str, int] = {}
        for capability in _CAPABILITIES:
            # Not `getattr`, which makes a new object of each fixture.
            declared = next(vars(kind)[capability] for kind in cls.__mro__ if capability in vars(kind))
            is_missing = (
                capability not in _WITH_DEFAULT and declared is vars(TransportConformance)[capability]
            )
            for name in (tests := _tests_with(capability)):
                is_left_out = is_missing or declared is None
                setattr(cls, name, None if is_left_out else getattr(TransportConformance, name))
            if is_missing:
                missing[capability] = len(tests)
        setattr(cls, _SUMMARY, _summary_of(cls.__name__, missing) if missing else None)


_CAPABILITIES = ("read_unchecked", "connect_raw", "on_guard_check")
_WITH_DEFAULT = ("on_guard_check",)
_SUMMARY = "test_all_capabilities_are_declared"


def _tests_with(capability: str) -> list[str]:
    """Return the names of the tests that need a capability."""
    tests = inspect.getmembers(TransportConformance, inspect.isfunction)
    return [
        name
        for name, test in tests
        if name.startswith("test_") and capability in inspect.signature(test).parameters
    ]


def _summary_of(suite: str, missing: Mapping[str, int]) -> Callable[[Any], None]:
    names = " and ".join(f"`{name}` ({count} tests)" for name, count in missing.items())

    def test_all_capabilities_are_declared(self: Any) -> None:
        pytest.skip(
            f"{suite}: not declared: {names}; override these fixtures, or set them to None if the transport has no such thing"
        )

    return test_all_capabilities_are_declared


@contextmanager
def _after_checks(guard: Guard, then: Callable[[], None]) -> Iterator[None]:
    def load_and_call(address: int) -> int:
        value = load_word(address)
        if value == guard.value:
            then()
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_memory, "load_word", load_and_call)
        yield
