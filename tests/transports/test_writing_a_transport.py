"""`docs/writing-a-transport.md`: its transport conforms, between threads, processes and connectors."""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kvferry import transports
from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config
from kvferry.connector.testing.harness import load
from kvferry.transports import Connected, Guard, PeerLost, Transport, registry
from kvferry.transports.errors import ProtocolError, StaleRegionError
from kvferry.transports.sums import SUM_BYTES
from kvferry.transports.testing import Link, Node, TransportConformance, World, pairs_of
from tests.support.peers import peers, said

DOCUMENT = (Path(__file__).parents[2] / "docs" / "writing-a-transport.md").read_text()
PAGE = 4096
POOL_BYTES = 5 << 20
HELD = Guard(3, 9)

#: Serves a pool whose byte i is `i * 7 % 251`, and prints its address. It ends when its standard input does.
SERVER = """
import sys, threading
import numpy as np
from kvferry.transports import Pool
from kvferry.transports.registry import create_transport

transport = create_transport("plaintcp", {})
arena = transport.allocate(5 << 20)
np.frombuffer(arena.buffer, np.uint8)[:] = (np.arange(5 << 20) * 7 % 251).astype(np.uint8)
endpoint = transport.register(Pool([arena.segment]))
transport.guards.set(3, 9)
print(endpoint.listen(""), flush=True)
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set(), endpoint.wake())).start()
while not over.is_set():
    endpoint.wait_events(60)
transport.close()
"""


def _code(heading: str, language: str = "python") -> str:
    """Return the code blocks below a heading of the page, one after the other."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## )", DOCUMENT, flags=re.MULTILINE | re.DOTALL)
    blocks = re.findall(rf"```{language}\n(.*?)```", section, flags=re.DOTALL)
    assert blocks, f"no {language} code below {heading!r}"
    return "\n".join(blocks)


def _load() -> ModuleType:
    module = ModuleType("plain_tcp")
    sys.modules["plain_tcp"] = module  # for the test on the page, which imports it
    code = _code("A complete transport, step by step")
    exec(compile(code, "plain_tcp.py", "exec"), module.__dict__)  # noqa: S102 - our own page
    return module


plain_tcp = _load()
exec(_code("Test it"))  # noqa: S102 - defines TestPlainTcp, as the page shows it


@pytest.fixture
def create() -> Callable[[], Transport]:
    def make() -> Transport:
        transport: Transport = plain_tcp.PlainTcpTransport()
        return transport

    return make


@pytest.fixture
def world(create: Callable[[], Transport]) -> Iterator[World]:
    world = World(create)
    yield world
    world.close()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the transport as an installed package, whose entry point is the page's."""
    (tmp_path / "plain_tcp.py").write_text(_code("A complete transport, step by step"))
    project = tomllib.loads(_code("Package it", "toml"))["project"]
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


def test_the_suite_of_the_page_is_the_whole_suite() -> None:
    assert issubclass(globals()["TestPlainTcp"], TransportConformance)


def test_the_page_reads_between_processes_and_notices_that_the_owner_is_killed(
    world: World, installed: Path
) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), *filter(None, sys.path)])}
    with peers(env=env) as start:
        process = start("-c", SERVER)
        node: Node = world.node(POOL_BYTES)
        peer_id = node.endpoint.start_connect(said(process), timeout_s=20)
        world.serve(lambda: bool(node.history))
        transfer_id = node.endpoint.start_read(peer_id, pairs_of((1, 0, POOL_BYTES - 1)), HELD, timeout_s=20)
        world.serve(lambda: bool(node.ends_of(transfer_id)))
        assert node.ends_of(transfer_id)[0].error is None
        expected = (np.arange(POOL_BYTES - 1) * 7 % 251).astype(np.uint8)
        assert np.array_equal(node.memory()[1:], expected)
        process.kill()
        world.serve(lambda: bool(node.of_type(PeerLost)))


def _backend(node: Node) -> Any:
    return node.endpoint._inner._backend  # type: ignore[attr-defined]


def _is_dropped(world: World, link: Link, kind: int, body: bytes) -> None:
    """Have the consumer send a frame that no honest peer sends, and wait until the producer drops it for
    that.
    """
    backend = _backend(link.consumer)
    backend.post(backend.peers.peer(link.producer_id), kind, body)
    world.serve(lambda: bool(link.producer.of_type(PeerLost)))
    assert isinstance(link.producer.of_type(PeerLost)[0].error, ProtocolError)


@pytest.mark.parametrize("kind", [0, 1, 2, 3, 4, 255])
def test_the_page_bounds_every_kind_of_frame(world: World, kind: int) -> None:
    """The length alone is enough: the producer waits for no byte of the body."""
    link = world.pair(POOL_BYTES)
    backend = _backend(link.consumer)
    peer = backend.peers.peer(link.producer_id)
    too_long = plain_tcp.FRAME_LIMITS.get(kind, -SUM_BYTES) + SUM_BYTES + 1
    peer.connection.stream.send(struct.pack("<IB", too_long, kind))
    world.serve(lambda: bool(link.producer.of_type(PeerLost)))
    assert isinstance(link.producer.of_type(PeerLost)[0].error, ProtocolError)


def test_the_page_takes_no_bytes_that_it_did_not_ask_for(world: World) -> None:
    link = world.pair(POOL_BYTES)
    before = link.producer.memory().copy()
    _is_dropped(world, link, plain_tcp.Kind.DATA, plain_tcp.DATA.pack(1, True) + b"x" * 64)
    assert np.array_equal(link.producer.memory(), before)


@pytest.mark.parametrize("num_bytes", [0, PAGE - 1, PAGE + 1, 2 * PAGE])
def test_the_page_takes_no_other_number_of_bytes_than_it_asked_for(world: World, num_bytes: int) -> None:
    link = world.pair(POOL_BYTES)
    before = link.consumer.memory().copy()
    transfer_id = link.consumer.endpoint.start_read(
        link.producer_id, pairs_of((0, 0, PAGE)), HELD, timeout_s=20
    )
    backend = _backend(link.producer)
    body = plain_tcp.DATA.pack(transfer_id, True) + b"x" * num_bytes
    backend.post(backend.peers.peer(link.consumer_id), plain_tcp.Kind.DATA, body)
    world.serve(lambda: bool(link.consumer.of_type(PeerLost)), link.consumer)
    assert link.consumer.ends_of(transfer_id)[0].error is not None
    assert np.array_equal(link.consumer.memory(), before)


def test_the_page_connects_to_a_host_by_its_name(world: World) -> None:
    server, client = world.node(PAGE), world.node(PAGE)
    address = server.endpoint.listen("").replace("127.0.0.1", "localhost")
    client.endpoint.start_connect(address, timeout_s=20)
    world.serve(lambda: bool(server.of_type(Connected) and client.of_type(Connected)))


def test_the_page_names_every_helper() -> None:
    authors = transports.__all__[transports.__all__.index("MAX_SIZES_BYTES") :]
    assert [name for name in authors if not re.search(rf"\b{name}\b", DOCUMENT)] == []


def test_the_page_needs_about_two_hundred_lines() -> None:
    lines = [line for line in _code("A complete transport, step by step").splitlines() if line.strip()]
    assert len(lines) <= 220


def test_a_connector_of_the_page_hands_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, "plaintcp", "plain_tcp:PlainTcpTransport")
    fields = json.loads(_code("Use it with a connector", "json"))
    config = engine_config(fields.pop("kv_connector"), role=fields.pop("kv_role"), **fields)
    shape = CacheShape()
    with ModelFreeNode(config, shape) as producer, ModelFreeNode(config, shape) as consumer:
        blocks, params = producer.prefill("p", 18)
        expected = producer.contents(blocks)
        loaded = load(consumer, producer, Request("d", 18, params))
        assert torch.equal(consumer.contents(loaded), expected)


def test_the_pages_one_sided_reads_check_the_guard_after_the_copy() -> None:
    page: dict[str, Any] = {}
    exec(_code("One-sided transports"), page)  # noqa: S102 - our own page
    (arena, pool_file), (words, table_file) = page["share"](2 * PAGE), page["share"](PAGE)
    mapped, table = (
        transports.FileMapping(descriptor, PAGE, mmap.PROT_READ).memory
        for descriptor in (pool_file, table_file)
    )
    guards = transports.WordTable(words.buffer, 8)  # type: ignore[arg-type]
    os.close(pool_file)
    os.close(table_file)
    np.frombuffer(arena.buffer, np.uint8)[:] = 7
    target = np.zeros(PAGE, np.uint8)
    addresses = (
        np.array([address], np.uint64) for address in (target.ctypes.data, transports.address_of(mapped))
    )
    regions = (*addresses, np.array([PAGE]))
    guards.set(HELD.index, HELD.value)
    page["read"](*regions, table, HELD)
    assert (target == 7).all()
    guards.clear(HELD.index)
    with pytest.raises(StaleRegionError):
        page["read"](*regions, table, HELD)


def test_the_suite_runs_outside_the_repository_without_a_warning(tmp_path: Path) -> None:
    """By the command of the page, in an empty folder, where this repository's settings of pytest do
    not hold.
    """
    (tmp_path / "plain_tcp.py").write_text(_code("A complete transport, step by step"))
    (tmp_path / "test_plain_tcp.py").write_text(_code("Test it").partition("pytest_plugins")[0])
    command = _code("Test it", "sh").split()
    done = subprocess.run(
        [sys.executable, "-m", *command, "-k", "one_pool or a_cleared_guard"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout
    assert "2 passed" in done.stdout, done.stdout
    assert "warning" not in (done.stdout + done.stderr).lower(), done.stdout + done.stderr
