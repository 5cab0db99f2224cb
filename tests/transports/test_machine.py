"""How much memory a process may use, with all kinds of limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.transports import _memory
from kvferry.transports._memory import require_available
from kvferry.transports.errors import ConfigurationError
from kvferry.transports.machine import memory_of_this_process, read_cgroup_memory, read_host_memory

V2 = "0::{group}\n"
V1 = "5:cpu,cpuacct:/elsewhere\n4:memory:{group}\n0::/elsewhere\n"


class System:
    """The kernel's files about a process in a control group."""

    def __init__(self, folder: Path) -> None:
        self.process, self.mounted = folder / "proc", folder / "cgroup"
        self.process.mkdir()
        self.mounted.mkdir()

    def put(self, groups: str, group: str, mount: str) -> None:
        """Put the process into `group` of a hierarchy. `mount` describes its mount: "root type options"."""
        root, kind, options = mount.split()
        (self.process / "cgroup").write_text(groups.format(group=group))
        (self.process / "mountinfo").write_text(
            "22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
            "30 22 0:30 / /sys/fs/cgroup/cpu rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
            f"31 22 0:26 {root} {self.mounted} rw,nosuid shared:4 - {kind} {kind} {options}\n"
        )

    def limit(self, version: int, group: str, limit: int | str, used: int, idle_cache: int = 0) -> None:
        folder = self.mounted / group.strip("/")
        folder.mkdir(parents=True, exist_ok=True)
        names = (
            ("memory.max", "memory.current")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        )
        for name, value in zip(names, (limit, used), strict=True):
            (folder / name).write_text(f"{value}\n")
        label = "inactive_file" if version == 2 else "inactive_file 0\ntotal_inactive_file"
        (folder / "memory.stat").write_text(f"anon 5\n{label} {idle_cache}\n")

    def read(self) -> tuple[int, int]:
        return read_cgroup_memory(self.process)


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


HIERARCHIES = pytest.mark.parametrize(
    ("version", "groups", "mount"), [(2, V2, "cgroup2 rw"), (1, V1, "cgroup rw,memory")], ids=["v2", "v1"]
)


@HIERARCHIES
@pytest.mark.parametrize(
    ("group", "root", "used", "free"),
    [
        pytest.param("/", "/", 700, 450, id="its-own-group-as-the-root"),
        pytest.param("/docker/abc", "/docker/abc", 300, 850, id="its-group-without-a-namespace"),
        pytest.param("/", "/", 1200, 0, id="more-than-allowed"),
    ],
)
def test_a_container_sees_its_group(
    system: System, version: int, groups: str, mount: str, group: str, root: str, used: int, free: int
) -> None:
    system.put(groups, group, f"{root} {mount}")
    system.limit(version, "/", 1000, used=used, idle_cache=150)
    # A group inside the container that has the same name as one above it.
    system.limit(version, "/docker", 10, used=1)
    assert system.read() == (1000, free)


@HIERARCHIES
def test_a_service_is_limited_by_its_group_and_by_those_above(
    system: System, version: int, groups: str, mount: str
) -> None:
    system.put(groups, "/system.slice/node.service", f"/ {mount}")
    system.limit(version, "/system.slice/node.service", 5000, used=100)
    system.limit(version, "/system.slice", 2000, used=1900, idle_cache=300)
    system.limit(version, "/", 9000, used=50)
    system.limit(version, "/user.slice", 10, used=1)
    assert system.read() == (2000, 400)


@pytest.mark.parametrize("limit", ["max", 9223372036854771712])
def test_a_group_without_a_limit(system: System, limit: int | str) -> None:
    system.put(V2, "/a", "/ cgroup2 rw")
    system.limit(2, "/a", limit, used=100)
    assert min(system.read()) > 1 << 60


def test_a_group_beyond_the_namespace_and_a_system_without_groups(system: System) -> None:
    assert min(system.read()) > 1 << 60
    system.put(V2, "/../../other", "/ cgroup2 rw")
    system.limit(2, "/", 1000, used=100)
    assert system.read() == (1000, 900)


def test_meminfo(tmp_path: Path) -> None:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:  100 kB\nMemFree:  10 kB\nMemAvailable:  60 kB\nHugePages_Total: 0\n")
    assert read_host_memory(path) == (100 << 10, 60 << 10)


def test_this_machine_has_memory() -> None:
    total, free = memory_of_this_process()
    assert 0 < free <= total


def test_an_arena_larger_than_the_containers_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_memory, "memory_of_this_process", lambda: (1000, 450))
    require_available(450)
    with pytest.raises(ConfigurationError, match="cannot allocate 451 bytes: 450 bytes of memory are free"):
        require_available(451)
