"""Nodes and routers as real processes, shared by the tests of a session where nothing is broken on purpose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.launcher import LaunchedProcess, Launcher
from demo.testing import Client
from engine.testing import write_tiny_model

START_TIMEOUT_S = 110.0
TINY_NODE = (
    "--threads", "1", "--num-blocks", "128", "--block-size", "16", "--max-num-batched-tokens", "64",
    "--log-level", "warning",
)  # fmt: skip
#: Long enough for a loaded machine, short enough to wait for its end.
LEASE = ("--connector-option", "lease_s=12", "--connector-option", "heartbeat_s=2")


@dataclass(frozen=True)
class Fleet:
    """A pair, the router in front of it, and a single node to compare with."""

    prefill: Client
    decode: Client
    router: Client
    single: Client


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights whose prompts may have up to 511 tokens."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="session")
def tiny_arguments(tiny_model: Path) -> tuple[str, ...]:
    """Options of a node that runs the tiny model."""
    return ("--model", str(tiny_model), *TINY_NODE)


@pytest.fixture(scope="session")
def session_launcher() -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """For processes that a test kills or that are to fail."""
    with Launcher() as launcher:
        yield launcher


def launch_fleet(launcher: Launcher, *arguments: str) -> Fleet:
    """Start a pair, a router and a single node, all with the same options, and wait for them."""
    prefill = launcher.start_node("prefill", "prefill", *arguments, *LEASE)
    decode = launcher.start_node("decode", "decode", *arguments, *LEASE)
    single = launcher.start_node("single", "single", *arguments)
    launcher.wait_listening([prefill, decode], START_TIMEOUT_S)
    router = launcher.start_router("router", [prefill], [decode])
    ready_clients(launcher, prefill, decode, single, router)
    return Fleet(Client(prefill), Client(decode), Client(router), Client(single))


def ready_clients(launcher: Launcher, *processes: LaunchedProcess) -> list[Client]:
    launcher.wait_ready(processes, START_TIMEOUT_S)
    return [Client(process) for process in processes]


@pytest.fixture(scope="session")
def tiny_fleet(session_launcher: Launcher, tiny_arguments: tuple[str, ...]) -> Fleet:
    """The tiny model in the uniform layout."""
    return launch_fleet(session_launcher, *tiny_arguments)


@pytest.fixture(scope="module")
def start_fleet() -> Iterator[Callable[..., Fleet]]:
    """Start fleets with other options; they end with the module's tests."""
    with Launcher() as launcher:
        yield lambda *arguments: launch_fleet(launcher, *arguments)
