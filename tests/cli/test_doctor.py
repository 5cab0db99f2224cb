"""`kvferry doctor`: what it finds on a machine, what it measures, and how it ends."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.cli.main import main
from kvferry.lab.machine import Finding, findings, gpus_of
from kvferry.lab.moving.contender import FailedError, Setup
from kvferry.lab.moving.ends import PathReader, Source
from kvferry.lab.moving.paths import PATHS, path_of
from kvferry.lab.moving.processes import Child
from kvferry.lab.moving.remote import Listener
from kvferry.lab.moving.shapes import Shape
from kvferry.transports.registry import BUILT_IN
from tests.support.cuda_stand_in import BINDINGS, CudaDriverStandIn, CUresult


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.cli.doctor.SECONDS", 0.02)


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def _named(findings: list[Finding], name: str) -> Finding:
    (found,) = (finding for finding in findings if finding.name == name)
    return found


class TestTheMachine:
    def test_what_hinders_is_named_with_its_setting_and_its_remedy(self, tmp_path: Path) -> None:
        files = {
            "proc/sys/kernel/yama/ptrace_scope": "1\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
            "sys/class/infiniband/mlx5_0/ports/2/state": "1: DOWN\n",
        }
        found = findings(_write(tmp_path, files))
        ptrace = _named(found, "ptrace scope")
        assert (ptrace.grade, "kernel.yama.ptrace_scope=1" in ptrace.found) == ("note", True)
        assert "kernel.yama.ptrace_scope=0" in ptrace.remedy
        assert "transparent_hugepage/enabled" in _named(found, "huge pages").remedy
        assert _named(found, "huge pages, shared").grade == "missing"
        assert "--shm-size" in _named(found, "/dev/shm").remedy or "tmpfs" in _named(found, "/dev/shm").remedy
        assert _named(found, "RDMA mlx5_0:1").found == "ACTIVE, 400 Gb/sec (4X NDR)"
        assert _named(found, "RDMA mlx5_0:2").grade == "note"

    def test_a_machine_without_gpus_and_rdma_is_not_broken(self, tmp_path: Path) -> None:
        found = findings(tmp_path)
        assert _named(found, "RDMA").grade == "missing"
        assert not [finding for finding in found if finding.grade == "failed"]

    def test_gpus_are_those_of_the_driver(self) -> None:
        found = list(gpus_of(_Driver()))  # type: ignore[arg-type]
        assert _named(found, "CUDA driver").found == "CUDA 12.9, 2 GPUs"
        assert _named(found, "GPU 0").found == "NVIDIA H100, 80 GiB, peer access to 1"
        (broken,) = gpus_of(_Driver(status=100))  # type: ignore[arg-type]
        assert (broken.grade, broken.found) == ("failed", "cuInit failed with error 100")


class _Driver:
    """The calls of `libcuda.so.1` that the doctor makes, for two GPUs of which the first reaches the
    second.
    """

    def __init__(self, status: int = 0) -> None:
        self._status = status

    def cuInit(self, flags: int) -> int:
        return self._status

    def __getattr__(self, name: str) -> Any:
        values = {"cuDriverGetVersion": 12090, "cuDeviceGetCount": 2, "cuDeviceTotalMem_v2": 80 << 30}

        def call(out: Any, *arguments: Any) -> int:
            if name == "cuDeviceGetName":
                out.value = b"NVIDIA H100"
            elif name == "cuDeviceCanAccessPeer":
                ctypes.cast(out, ctypes.POINTER(ctypes.c_int))[0] = arguments == (0, 1)
            elif name == "cuDeviceTotalMem_v2":
                ctypes.cast(out, ctypes.POINTER(ctypes.c_size_t))[0] = values[name]
            else:
                ctypes.cast(out, ctypes.POINTER(ctypes.c_int))[0] = values.get(name, 0)
            return 0

        return call


def test_every_transport_between_processes_has_a_path() -> None:
    assert {path.scheme for path in PATHS.values()} == set(BUILT_IN) - {"inproc"}


def test_the_paths_of_this_machine_are_measured_and_a_broken_one_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = ["--options", json.dumps({"tcp": {"window_slices": 0}})]
    assert main(["doctor", "--path", "shm", "tcp", "--json", *bad]) == 1
    found = json.loads(capsys.readouterr().out)
    shm, tcp = found["paths"]
    assert (shm["status"], shm["transport"], shm["mechanism"]) == ("ok", "shm", "mapped")
    assert shm["speeds"][0]["gb_per_s"] > 0
    assert shm["speeds"][0]["of_memcpy"] > 0
    assert tcp["status"] == "failed"
    assert "window_slices must be" in tcp["reason"]
    assert found["ok"] is False
    assert found["versions"]["kvferry"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--options", "{"], "--options='{' is no JSON"),
        (["--options", "[" * 100_000], "has more than 16 levels"),
        (["--options", '{"tcp": {"port": ' + "1" * 5000 + "}}"], "a number of more than 4096 bits"),
        (["--options", '{"infiniband": {}}'], "'infiniband'"),
        (["--listen", "localhost"], "--listen must be HOST:PORT"),
        (["--peer", "::1:7000"], "--peer must be HOST:PORT, with brackets"),
        (["--peer", "gopher://x"], "unknown transport 'gopher'"),
        (["--peer", "auto://x"], "--peer='auto://x': not an auto address"),
        (["--port-range", "1-2"], "--port-range needs --listen"),
        (
            ["--listen", "127.0.0.1:0", "--port-range", "5-1"],
            "--port-range must be LOW-HIGH within 1-65535, got '5-1'",
        ),
        (["--listen", "127.0.0.1:0", "--port-range", "9" * 5000 + "-1"], "--port-range must be LOW-HIGH"),
    ],
)
def test_a_wrong_option_is_named_and_ends_with_status_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    assert named in capsys.readouterr().err


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    """A doctor that listens; its address, and what it logs."""
    lines: list[str] = []
    listening = Listener("127.0.0.1", 0, lambda name: path_of(name), lines.append)
    thread = threading.Thread(target=listening.serve)
    thread.start()
    yield "{}:{}".format(*listening.address), lines
    listening.close()
    thread.join()


def test_a_peer_is_reached_over_the_transport_that_is_reported(
    listener: tuple[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    address, lines = listener
    assert main(["doctor", "--peer", address, "--path", "tcp", "auto", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["on"] == "this host"
    tcp, auto = found["paths"]
    assert (tcp["status"], tcp["transport"]) == ("ok", "tcp")
    assert tcp["speeds"][0]["gb_per_s"] > 0
    assert (auto["transport"], auto["mechanism"], auto["reason"]) == ("shm", "mapped", "on this host")
    assert [line.split(":")[1].strip() for line in lines] == ["tcp", "auto"]


@pytest.mark.parametrize("scheme", ["tcp", "auto"])
def test_a_running_node_is_connected_to_and_not_read(scheme: str, capsys: pytest.CaptureFixture[str]) -> None:
    plaintext = {"network": "zeromq", "network_options": {"curve": "off"}} if scheme == "auto" else None
    node = Source(path_of(scheme, plaintext), 1 << 20)
    is_over = threading.Event()
    thread = threading.Thread(target=node.serve_until, args=(is_over.is_set,))
    thread.start()
    try:
        assert main(["doctor", "--peer", node.address]) == 0
    finally:
        is_over.set()
        thread.join()
        node.close()
    shown = capsys.readouterr().out
    assert "connected in" in shown
    assert "GB/s" not in shown


@pytest.mark.parametrize(("load", "warns"), [(1.5, False), (2.5, True)])
def test_figures_of_a_busy_machine_come_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], load: float, warns: bool
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert main(["doctor", "--path", "shm", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["ok"] is True
    expected = "warning: the load average is 2.5 on 2 cores, so the figures say more about other programs"
    assert printed.err.startswith(expected) if warns else printed.err == ""


def test_a_peer_that_does_not_answer_ends_with_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--peer", "127.0.0.1:1"]) == 1
    assert "kvferry doctor --listen 127.0.0.1:1" in capsys.readouterr().err


def _be_killed(parent: Connection) -> None:
    parent.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_library_that_ends_its_process_does_not_end_the_doctor() -> None:
    child = Child(_be_killed)
    with pytest.raises(FailedError, match="ended by SIGKILL"):
        child.ask("anything", 30)


def test_bench_measures_each_shape_over_each_path(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--path", "shm", "--seconds", "0.02", "--shape", "1x64", "16x64"]
    assert main(["bench", *arguments]) == 0
    rows = [line.split()[0:5] for line in capsys.readouterr().out.splitlines() if line.startswith("shm")]
    assert rows == [["shm", "mapped", "1", "x", "64"], ["shm", "mapped", "16", "x", "64"]]


def test_bench_names_a_shape_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--shape", "64x64", "2048x64"]) == 2
    assert "--shape='2048x64' takes 128 MiB, and may take 64" in capsys.readouterr().err


class _DriverWithMemory(CudaDriverStandIn):
    """The stand-in, with the calls by which a program allocates and fills memory."""

    def cuMemAlloc(self, num_bytes: int) -> tuple[Any, ...]:
        self.held["memory"] += 1
        return (CUresult.CUDA_SUCCESS, self.allocate(num_bytes).segment.address)

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        self.held["memory"] -= 1
        return (CUresult.CUDA_SUCCESS,)

    def cuMemcpyHtoD(self, target: int, source: int, num_bytes: int) -> tuple[Any, ...]:
        ctypes.memmove(self._bytes(target), source, num_bytes)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemcpyDtoH(self, target: int, source: int, num_bytes: int) -> tuple[Any, ...]:
        ctypes.memmove(target, self._bytes(source), num_bytes)
        return (CUresult.CUDA_SUCCESS,)

    def _bytes(self, address: int) -> int:
        memory = self._find(address)
        assert memory is not None
        return address - memory.base + memory.shadow


def test_a_pool_on_a_gpu_is_read_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with _DriverWithMemory() as driver:
        for name in BINDINGS:
            monkeypatch.setitem(sys.modules, name, driver)
        source = Source(path_of("shm-gpu"), 1 << 20)
        is_over = threading.Event()
        thread = threading.Thread(target=source.serve_until, args=(is_over.is_set,))
        thread.start()
        reader = PathReader(Setup(1 << 20, {"path": path_of("shm-gpu")}), source.address)
        pairs = Shape(4, 64 << 10).pairs(1 << 20, np.random.default_rng(0))
        mechanism = reader.read(pairs)
        reader.check(pairs)
        with pytest.raises(ValueError, match="not those that were sent"):
            reader.check(pairs)
        reader.close()
        is_over.set()
        thread.join()
        source.close()
        assert mechanism == "cuda_ipc"
        assert not driver.violations
        assert not +driver.held
