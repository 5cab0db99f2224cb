"""Nodes that are stopped exit with status 0 on a host that has the libraries of RDMA (Debian's `libibverbs1`
and others).

NIXL's wheel has copies of some of these libraries, and its UCX loads the host's as well. A process must
survive both.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvferry.lab.servers import LaunchedProcess, Launcher, Spawn
from tests.support.client import DO_REMOTE_DECODE, Client
from tests.support.zygote import Zygote

pytestmark = pytest.mark.full

#: What `make tools` downloads.
LIBRARIES = Path(__file__).resolve().parents[2] / "build" / "rdma-libraries"
START_TIMEOUT_S = 110.0
END_S = 20.0
PROMPT = "The ferry ties up for the night, and the harbour master counts its passengers. " * 3

NO_UCX = pytest.mark.skipif(find_spec("ucxx") is None, reason="ucxx is not installed")
NO_NIXL = pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="nixl_cu12 is not installed")
#: Cases: transport, its options, and whether its nodes load the host's libraries.
CASES = [
    pytest.param("shm", {}, False, id="shm"),
    pytest.param("zeromq", {}, False, id="zeromq", marks=pytest.mark.full),
    pytest.param("tcp", {}, False, id="tcp", marks=pytest.mark.full),
    pytest.param("ucx", {}, False, id="ucx", marks=NO_UCX),
    pytest.param("nixl", {}, True, id="nixl", marks=NO_NIXL),
    pytest.param("auto", {"network": "nixl,tcp"}, True, id="auto-nixl", marks=NO_NIXL),
]


@pytest.fixture(scope="module")
def spawn() -> Iterator[Spawn]:
    """Start nodes that find the libraries of RDMA, without installing them."""
    folders = [*LIBRARIES.glob("usr/lib/*"), *LIBRARIES.glob("lib/*")]
    if not folders:
        pytest.skip("no build/rdma-libraries: run `make tools`")
    with pytest.MonkeyPatch.context() as patch:
        path = [*map(str, folders), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        patch.setenv("LD_LIBRARY_PATH", os.pathsep.join(path))
        zygote = Zygote()
    with zygote:
        yield zygote.spawn


def loads_libraries(node: LaunchedProcess) -> bool:
    """Return whether a process has loaded the libraries of `make tools`."""
    maps = Path(f"/proc/{node.pid}/maps").read_text()
    return re.search(rf"{re.escape(str(LIBRARIES))}/\S*/libibverbs\.so", maps) is not None


@pytest.mark.parametrize(("scheme", "options", "is_loading"), CASES)
def test_nodes_exit_with_status_0_after_a_drain_and_after_the_crash_of_a_peer(
    launcher: Launcher,
    tiny_single_arguments: tuple[str, ...],
    scheme: str,
    options: Mapping[str, object],
    is_loading: bool,
) -> None:
    given = ("--connector", scheme, "--connector-option", f"transport_options={json.dumps(options)}")
    roles = {"prefill": "prefill", "decode": "decode", "crashing": "decode"}
    nodes = {
        name: launcher.start_node(name, role, *tiny_single_arguments, *given) for name, role in roles.items()
    }
    launcher.wait_ready([*nodes.values()], START_TIMEOUT_S)
    prefill = Client(nodes["prefill"])
    for name in ("decode", "crashing"):
        offered = prefill.complete(f"{name} {PROMPT}", max_tokens=1, kv_transfer_params=DO_REMOTE_DECODE)
        params = offered.body["kv_transfer_params"]
        reply = Client(nodes[name]).complete(f"{name} {PROMPT}", max_tokens=2, kv_transfer_params=params)
        assert (reply.transfer["error"], reply.transfer["num_bytes"] > 0) == ("", True)
    assert loads_libraries(nodes["prefill"]) == is_loading
    nodes.pop("crashing").kill()
    ends = {}
    for name in ("decode", "prefill"):
        nodes[name].terminate()
        ends[name] = nodes[name].wait(END_S)
    assert ends == {"decode": 0, "prefill": 0}
