"""How much memory this process may use: the machine's, within the limits of its control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 62


def memory_of_this_process() -> tuple[int, int]:
    """Return the bytes in total, and the bytes that can still be allocated, of the machine or the container,
    whichever is less.
    """
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
    """Read how much memory the control groups of a process, version 2 or 1, allow it.

    The limits of all visible parent groups apply as well; the tightest one counts. Page cache that the kernel
    can drop does not count as used.

    Args:
        process: Its folder in `/proc`.

    Returns:
        `(limit, left)` in bytes; if there is no limit, more than any machine has.
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
            except (OSError, ValueError):
                continue  # the file of the other version; the root group, which has no limit; or not readable
            limit, left = min(limit, most), min(left, max(0, most - max(0, used)))
    return limit, left


def _folders(process: Path) -> Iterator[Path]:
    """Yield the folders of the groups that limit a process's memory, for each mounted hierarchy from its own
    group upwards.
    """
    try:
        own = dict(_own_groups((process / "cgroup").read_text()))
        mounts = list(_mounts((process / "mountinfo").read_text()))
    except OSError:
        return
    for version, root, mounted in mounts:
        group = own.get(version, root)
        # A mount may show only a part of the hierarchy, as in a container. Groups outside that part cannot be
        # read.
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
    """Yield version, root and mount point of each mounted hierarchy that may limit memory."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        root, mounted = before.split()[3:5]
        kind, *_, options = after.split()
        if kind == "cgroup2":
            yield 2, PurePosixPath(root), Path(mounted)
        elif kind == "cgroup" and "memory" in options.split(","):
            yield 1, PurePosixPath(root), Path(mounted)


def _droppable(stat: Path) -> int:
    """Return the bytes of inactive page cache.

    Version 1 has a figure for the group alone and one for its subtree.
    """
    found = [line.split() for line in stat.read_text().splitlines()]
    return max(
        (int(line[1]) for line in found if line[0] in ("inactive_file", "total_inactive_file")), default=0
    )
