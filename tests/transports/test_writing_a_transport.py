"""`docs/writing-a-transport.md`: its transport conforms, between threads, processes and connectors."""

from __future__ import annotations

import json
import os
import re
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

from kvferry.connector.testing import CacheShape, ModelFreeNode, Request, engine_config
from kvferry.connector.testing.harness import load
from kvferry.transports import Guard, PeerLost, Transport, registry
from kvferry.transports.testing import Node, TransportConformance, World, pairs_of

PAGE = (Path(__file__).parents[2] / "docs" / "writing-a-transport.md").read_text()
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
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## )", PAGE, flags=re.MULTILINE | re.DOTALL)
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
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    )
    with process:
        try:
            assert process.stdout is not None
            node: Node = world.node(POOL_BYTES)
            peer_id = node.endpoint.start_connect(process.stdout.readline().strip(), timeout_s=20)
            world.serve(lambda: bool(node.history))
            transfer_id = node.endpoint.start_read(
                peer_id, pairs_of((1, 0, POOL_BYTES - 1)), HELD, timeout_s=20
            )
            world.serve(lambda: bool(node.ends_of(transfer_id)))
            assert node.ends_of(transfer_id)[0].error is None
            expected = (np.arange(POOL_BYTES - 1) * 7 % 251).astype(np.uint8)
            assert np.array_equal(node.memory()[1:], expected)
            process.kill()
            world.serve(lambda: bool(node.of_type(PeerLost)))
        finally:
            process.kill()


@pytest.mark.parametrize("rows", [[(0, 1 << 40)], [(-1, 1)], [(0, 0)], [(0, POOL_BYTES)]])
def test_the_page_serves_no_byte_outside_its_pool(world: World, rows: list[tuple[int, int]]) -> None:
    """A peer that skips its own checks is dropped."""
    link = world.pair(POOL_BYTES)
    backend: Any = link.consumer.endpoint._inner._table.backend  # type: ignore[attr-defined]
    peer = backend._table.peer(link.producer_id)
    body = plain_tcp.READ.pack(1, 0, 1) + np.array(rows, dtype=np.int64).tobytes()
    backend._queue(peer, plain_tcp.Kind.READ, body)
    world.serve(lambda: bool(link.producer.of_type(PeerLost)))


@pytest.mark.parametrize("index", [-1, 1 << 40])
def test_the_page_looks_at_no_guard_outside_its_table(world: World, index: int) -> None:
    link = world.pair(POOL_BYTES)
    backend: Any = link.consumer.endpoint._inner._table.backend  # type: ignore[attr-defined]
    body = plain_tcp.READ.pack(1, index, 1) + np.array([(0, 1)], dtype=np.int64).tobytes()
    backend._queue(backend._table.peer(link.producer_id), plain_tcp.Kind.READ, body)
    world.serve(lambda: bool(link.producer.of_type(PeerLost)))


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
