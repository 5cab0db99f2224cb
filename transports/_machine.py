"""How much memory this process may have: the machine's, within the limits of the control groups that it is in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 62


def memory_of_this_process() -> tuple[int, int]:
    """Bytes that there are in all, and that can still be allocated: each the least of the machine's and the container's."""
    total, free = read_host_memory(Path("/proc/meminfo"))
    limit, left = read_cgroup_memory(Path("/proc/self"))
    return min(total, limit), min(free, left)


def read_host_memory(meminfo: Path) -> tuple[int, int]:
    """Read total and available bytes from a `/proc/meminfo`."""
    sizes = {}
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) << 10
    return sizes["MemTotal"], sizes["MemAvailable"]


def read_cgroup_memory(process: Path) -> tuple[int, int]:
    """Read what the control groups of a process, version 2 or 1, allow it.

    Every group above its own counts as well, as far as it can be seen: the one with the least left is where it ends. Page
    cache that the kernel can drop is not counted as used.

    Args:
        process: Its folder in `/proc`.

    Returns:
        `(limit, left)` in bytes; more than any machine has where there is no limit.
    """
    limit = left = _NO_LIMIT
    for folder in _folders(process):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            try:
                text = (folder / limit_name).read_text().strip()
                most = _NO_LIMIT if text == "max" else int(text)
                used = int((folder / used_name).read_text()) - _droppable(folder / "memory.stat")
            except (
                OSError,
                ValueError,
            ):  # another version's, the root's, which has no limit, or not ours to read
                continue
            limit, left = min(limit, most), min(left, max(0, most - max(0, used)))
    return limit, left


def _folders(process: Path) -> Iterator[Path]:
    """The folders of the groups that limit a process's memory, its own first, in each mounted hierarchy."""
    try:
        own = dict(_own_groups((process / "cgroup").read_text()))
        mounts = list(_mounts((process / "mountinfo").read_text()))
    except OSError:
        return
    for version, root, mounted in mounts:
        group = own.get(version, root)
        # A mount may show a part of the hierarchy only, as it does in a container; what is beside it is not ours to see.
        inside = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath()
        if ".." in inside.parts:
            inside = PurePosixPath()
        yield from (mounted / part for part in (inside, *inside.parents))


def _own_groups(cgroup: str) -> Iterator[tuple[int, PurePosixPath]]:
    for line in cgroup.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield 2, PurePosixPath(path)
        elif "memory" in controllers.split(","):
            yield 1, PurePosixPath(path)


def _mounts(mountinfo: str) -> Iterator[tuple[int, PurePosixPath, Path]]:
    """Version, root and place of each mounted hierarchy that may limit memory."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        root, mounted = before.split()[3:5]
        kind, *_, options = after.split()
        if kind == "cgroup2":
            yield 2, PurePosixPath(root), Path(mounted)
        elif kind == "cgroup" and "memory" in options.split(","):
            yield 1, PurePosixPath(root), Path(mounted)


def _droppable(stat: Path) -> int:
    """Bytes of idle page cache; version 1 has one figure for the group alone and one for its whole tree."""
    found = [line.split() for line in stat.read_text().splitlines()]
    return max(
        (int(line[1]) for line in found if line[0] in ("inactive_file", "total_inactive_file")), default=0
    )
