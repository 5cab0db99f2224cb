"""Nodes and routers as real processes. Tests that break nothing on purpose share them for the whole session.

A test that needs a pair of nodes is written once for all transports (the fixture `transport`). The variable
CONNECTORS names the transports to use, e.g. `CONNECTORS="zeromq ucx"`. Without it, all run over shared memory
in `make test`, and those marked `every_transport` over each transport in `make test ALL=1`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvferry.lab.servers import Launcher, Spawn
from kvferry.transports.registry import BUILT_IN
from tests.support.client import Client
from tests.support.tiny_models import write_tiny_model
from tests.support.zygote import Zygote

#: Not `inproc`, which stays in one process; `auto`, which is one of the others; and `nixl`, which `make
#: test-nixl` tests.
TRANSPORTS = tuple(scheme for scheme in BUILT_IN if scheme not in ("inproc", "auto", "nixl"))
START_TIMEOUT_S = 110.0
TINY_NODE = (
    "--threads", "1", "--num-blocks", "128", "--block-size", "16", "--max-num-batched-tokens", "64",
    "--log-level", "warning",
)  # fmt: skip
#: Long enough for a loaded machine, and short enough that a test can wait until a lease expires.
LEASE = ("--connector-option", "lease_s=6")

#: A node that a test stops must count as alive until the test has inspected the others, also on a busy
#: machine.
PATIENT = ("--connector-option", 'transport_options={"peer_timeout_s": 10}')


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "every_transport: runs over each transport, also without CONNECTORS")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "transport" in metafunc.fixturenames:
        every = metafunc.definition.get_closest_marker("every_transport")
        names = os.environ.get("CONNECTORS", " ".join(TRANSPORTS) if every else "shm").split()
        parameters = [over(name, is_full="CONNECTORS" not in os.environ and name != "shm") for name in names]
        metafunc.parametrize("transport", parameters, indirect=True, scope="session")


def over(name: str, *, is_full: bool) -> object:
    """Return the parameter for one transport, skipped where the transport is not installed."""
    package = BUILT_IN[name].package
    is_missing = package != "" and find_spec(package) is None
    marks = [pytest.mark.skipif(is_missing, reason=f"{package} is not installed")]
    return pytest.param(name, marks=[*marks, pytest.mark.full] if is_full else marks)


@dataclass(frozen=True)
class Fleet:
    """A pair, the router in front of it, and a single node to compare with."""

    prefill: Client
    decode: Client
    router: Client
    single: Client


@pytest.fixture(scope="session")
def transport(request: pytest.FixtureRequest) -> str:
    """The transport between the nodes of a pair."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def spawn() -> Iterator[Spawn]:
    """Start processes without waiting for them to import PyTorch."""
    with Zygote() as zygote:
        yield zygote.spawn


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A folder with a short path, because socket paths have at most 107 bytes and `tmp_path` may be long."""
    with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
        yield Path(folder)


@pytest.fixture
def launcher(spawn: Spawn) -> Iterator[Launcher]:
    """A launcher for processes that a test kills, or that should fail."""
    with Launcher(spawn) as launcher:
        yield launcher


@pytest.fixture(scope="module")
def module_launcher(spawn: Spawn, transport: str) -> Iterator[Launcher]:
    """A launcher for nodes that the tests of a module share over one transport."""
    with Launcher(spawn) as launcher:
        yield launcher


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, for prompts of up to 511 tokens."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the same architecture and other weights."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "other", seed=1)


@pytest.fixture(scope="session")
def tiny_single_arguments(tiny_model: Path) -> tuple[str, ...]:
    """Options of a single node that runs the tiny model."""
    return ("--model", str(tiny_model), *TINY_NODE)


@pytest.fixture(scope="session")
def tiny_arguments(tiny_single_arguments: tuple[str, ...], transport: str) -> tuple[str, ...]:
    """Options of a node in a pair that runs the tiny model."""
    patience = PATIENT if transport in ("zeromq", "tcp", "ucx") else ()
    return (*tiny_single_arguments, "--connector", transport, *patience)


@pytest.fixture(scope="session")
def tiny_single(spawn: Spawn, tiny_single_arguments: tuple[str, ...]) -> Iterator[Client]:
    """A single node with the tiny model, whose answers are the expected ones."""
    with Launcher(spawn) as launcher:
        node = launcher.start_node("single", "single", *tiny_single_arguments).wait_ready(START_TIMEOUT_S)
        yield Client(node)


def launch_fleet(launcher: Launcher, single: Client, *arguments: str, for_all: Sequence[str] = ()) -> Fleet:
    """Start a pair with the same options and a router, and wait until all are ready.

    The router gets only the last arguments.
    """
    arguments = (*arguments, *for_all)
    nodes = [launcher.start_node(role, role, *arguments, *LEASE) for role in ("prefill", "decode")]
    prefill, decode = nodes
    launcher.wait_listening(nodes, START_TIMEOUT_S)
    router = launcher.start_router("router", [prefill], [decode], *for_all)
    launcher.wait_ready([*nodes, router], START_TIMEOUT_S)
    return Fleet(Client(prefill), Client(decode), Client(router), single)


@pytest.fixture(scope="session")
def admin_key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key of the admin endpoints of `tiny_fleet`."""
    file = tmp_path_factory.mktemp("keys") / "admin"
    file.write_text("sk-admin\n")
    file.chmod(0o600)
    return file


@pytest.fixture(scope="session")
def tiny_fleet(
    spawn: Spawn,
    tiny_single: Client,
    tiny_arguments: tuple[str, ...],
    transport: str,
    admin_key_file: Path,
) -> Iterator[Fleet]:
    """The tiny model in the uniform layout, with admin endpoints."""
    admin = ("--admin-port", "0", "--admin-api-key-file", str(admin_key_file))
    with Launcher(spawn) as launcher:
        yield launch_fleet(launcher, tiny_single, *tiny_arguments, for_all=admin)


@pytest.fixture(scope="module")
def start_fleet(module_launcher: Launcher, transport: str) -> Callable[..., Fleet]:
    """Start pairs with other options. They end with the module's tests."""
    return lambda single, *arguments: launch_fleet(
        module_launcher, single, *arguments, "--connector", transport
    )
