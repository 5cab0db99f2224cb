"""What this machine is, and offers to handoffs: the kernel, its limits, network devices and GPUs.

Each check of `findings` reads or tries one thing, in microseconds, and leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import resource
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from kvferry.transports.copying import IS_COMPILED, IS_ORDERED
from kvferry.transports.machine import memory_of_this_process

#: `ok`; `note`: works, but something would be better otherwise; `missing`: this machine has none; `failed`:
#: it is broken.
Grade = Literal["ok", "note", "missing", "failed"]

#: Fewer descriptors than this serve few peers.
_FEW_DESCRIPTORS: Final = 4096

#: Docker's default for `/dev/shm`.
_SMALL_SHM_BYTES: Final = 64 << 20

_INFINITE: Final = resource.RLIM_INFINITY


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        found: What was found.
        remedy: What to do about it; empty if nothing needs to be done.
    """

    group: str
    name: str
    grade: Grade
    found: str
    remedy: str = ""

    def to_json(self) -> dict[str, str]:
        """The finding for programs."""
        return asdict(self)


def findings(root: Path = Path("/")) -> list[Finding]:
    """Run all checks.

    Args:
        root: Where `proc`, `sys` and `dev` are found; a test has a folder of its own.
    """
    return [*_kernel(root), *_memory(root), *_rdma(root), *_gpus(root)]


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} {unit}" if num_bytes >= 10 or unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("the last unit ends the loop")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _chosen(path: Path) -> str:
    """Return the choice of a kernel setting, which is in brackets; empty if the kernel has no such
    setting.
    """
    return _text(path).partition("[")[2].partition("]")[0]


def _unless(is_bad: bool, group: str, name: str, found: str, remedy: str) -> Finding:
    """Return a note with a remedy if something is bad, otherwise that it is fine."""
    return Finding(group, name, "note", found, remedy) if is_bad else Finding(group, name, "ok", found)


# -- the kernel --------------------------------------------------------------------------------------


def _kernel(root: Path) -> Iterator[Finding]:
    yield _memfd()
    # Path `shm-foreign` of the doctor tries what Yama allows.
    scope = _text(root / "proc/sys/kernel/yama/ptrace_scope")
    setting = f"kernel.yama.ptrace_scope={scope}" if scope else "not restricted by Yama"
    if scope in ("", "0"):
        found = f"{setting}: processes of one user may read each other"
    else:
        found = f"{setting}: other processes' ordinary memory needs CAP_SYS_PTRACE"
    remedy = (
        "only pools that shm did not allocate need it: let the transport allocate the pool, or set "
        "kernel.yama.ptrace_scope=0"
    )
    yield _unless(scope not in ("", "0"), "kernel", "ptrace scope", found, remedy)
    if IS_COMPILED:
        yield Finding("kernel", "copy loop", "ok", "compiled")
    else:
        remedy = "install a C compiler and reinstall kvferry, or install the wheel for this platform"
        if IS_ORDERED:
            yield Finding(
                "kernel", "copy loop", "note", "in Python, at about two thirds of the speed", remedy
            )
        else:
            found = "in Python: slower, and shm needs the compiled one on this processor"
            yield Finding("kernel", "copy loop", "failed", found, remedy)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != _INFINITE and soft < _FEW_DESCRIPTORS
    remedy = f"a node with many peers needs more: `ulimit -n 65536`, or LimitNOFILE=65536 (now {soft})"
    yield _unless(few, "kernel", "descriptors", f"{soft} (hard limit {hard})", remedy)


def _memfd() -> Finding:
    """Try what `shm` does: a sealed file in memory."""
    try:
        with open(os.memfd_create("kvferry-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb") as file:
            file.truncate(4096)
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except (AttributeError, OSError) as error:
        found = f"no sealed files in memory: {error}"
        return Finding("kernel", "memfd", "failed", found, "use tcp or zeromq instead of shm")
    return Finding("kernel", "memfd", "ok", "sealed files in memory")


# -- memory ------------------------------------------------------------------------------------------


def _memory(root: Path) -> Iterator[Finding]:
    total, free = memory_of_this_process()
    yield Finding("memory", "available", "ok", f"{_size(free)} of {_size(total)}")
    for name, file in (("huge pages", "enabled"), ("huge pages, shared", "shmem_enabled")):
        chosen = _chosen(root / "sys/kernel/mm/transparent_hugepage" / file)
        if not chosen:
            yield Finding("memory", name, "missing", "this kernel has no transparent huge pages")
            continue
        # Of shared memory, shm collapses its pools itself (MADV_COLLAPSE), which works with "never" as well.
        collapses = chosen in ("never", "deny") and file == "shmem_enabled"
        found = f"{chosen}; shm collapses its pools into them" if collapses else chosen
        remedy = (
            f"echo madvise > /sys/kernel/mm/transparent_hugepage/{file}: copies of pools of ordinary memory are "
            "then faster"
        )
        yield _unless(chosen == "never" and not collapses, "memory", name, found, remedy)
    yield _shm_folder(root / "dev/shm")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == _INFINITE else _size(soft)
    needed = soft != _INFINITE and any((root / "sys/class/infiniband").glob("*"))
    remedy = f"RDMA locks whole pools: `ulimit -l unlimited`, or LimitMEMLOCK=infinity (now {found})"
    yield _unless(needed, "memory", "memlock", found, remedy)


def _shm_folder(folder: Path) -> Finding:
    needed = "shm does not need it, but PyTorch, UCX and NIXL do"
    try:
        about = os.statvfs(folder)
    except OSError as error:
        found = f"not usable: {error.strerror}"
        return Finding("memory", "/dev/shm", "note", found, f"{needed}: mount a tmpfs there")
    total, free = about.f_blocks * about.f_frsize, about.f_bavail * about.f_frsize
    remedy = f"{needed}: `docker run --shm-size=1g` or a larger tmpfs"
    found = f"{_size(free)} of {_size(total)}"
    return _unless(total <= _SMALL_SHM_BYTES, "memory", "/dev/shm", found, remedy)


# -- devices -----------------------------------------------------------------------------------------


def _rdma(root: Path) -> Iterator[Finding]:
    devices = root / "sys/class/infiniband"
    if not any(devices.glob("*")):
        yield Finding("devices", "RDMA", "missing", "no device in /sys/class/infiniband; the network is TCP")
    for port in sorted(devices.glob("*/ports/*")):
        state = _text(port / "state")
        facts = (state.rpartition(": ")[2], _text(port / "rate"), _text(port / "link_layer"))
        name = f"RDMA {port.parent.parent.name}:{port.name}"
        remedy = "bring the port up, or choose another device with net_devices"
        is_down = not state.endswith("ACTIVE")
        yield _unless(is_down, "devices", name, ", ".join(filter(None, facts)), remedy)


def _gpus(root: Path) -> Iterator[Finding]:
    """Ask CUDA's driver itself, which needs neither PyTorch nor bindings, and creates no context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        if any((root / "dev").glob("nvidia[0-9]*")):
            remedy = "install the driver's library, or run the container with NVIDIA's toolkit (`--gpus all`)"
            yield Finding("devices", "GPU", "failed", "there is a device, but no libcuda.so.1", remedy)
        else:
            yield Finding("devices", "GPU", "missing", "no NVIDIA driver; caches are in main memory")
    else:
        yield from gpus_of(driver)


def gpus_of(driver: ctypes.CDLL) -> Iterator[Finding]:
    """Ask CUDA's driver for its devices.

    Args:
        driver: `libcuda.so.1`, or what a test puts in its place.
    """
    status = driver.cuInit(0)
    if status:
        remedy = "run `nvidia-smi`: it says more; if it works, check the container's devices and permissions"
        yield Finding("devices", "GPU", "failed", f"cuInit failed with error {status}", remedy)
        return
    version, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetCount(ctypes.byref(count))
    found = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}, {count.value} GPUs"
    yield Finding("devices", "CUDA driver", "ok", found)
    for ordinal in range(count.value):
        device, name, num_bytes = ctypes.c_int(), ctypes.create_string_buffer(128), ctypes.c_size_t()
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        driver.cuDeviceGetName(name, len(name), device)
        driver.cuDeviceTotalMem_v2(ctypes.byref(num_bytes), device)
        peers = [
            str(other)
            for other in range(count.value)
            if other != ordinal and _reaches(driver, ordinal, other)
        ]
        reach = (
            f", peer access to {' '.join(peers)}" if peers else ", no peer access" if count.value > 1 else ""
        )
        text = f"{name.value.decode(errors='replace')}, {_size(num_bytes.value)}{reach}"
        yield Finding("devices", f"GPU {ordinal}", "ok", text)
    if count.value and find_spec("cuda") is None:
        remedy = "`pip install '.[cuda]'` in the clone of kvferry: without it no pool can be on a GPU"
        yield Finding("devices", "CUDA bindings", "note", "not installed", remedy)


def _reaches(driver: ctypes.CDLL, one: int, other: int) -> bool:
    can = ctypes.c_int()
    return driver.cuDeviceCanAccessPeer(ctypes.byref(can), one, other) == 0 and bool(can.value)


# -- for figures -------------------------------------------------------------------------------------


def about() -> dict[str, object]:
    """Describe what figures depend on: the machine, its load and settings, and versions."""
    info = _text(Path("/proc/cpuinfo")).splitlines()
    names = [line.partition(": ")[2] for line in info if line.startswith("model name")]
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage")
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "kernel": platform.release(),
        "huge_pages": _chosen(huge_pages / "enabled"),
        "shared_huge_pages": _chosen(huge_pages / "shmem_enabled"),
        "congestion_control": _text(Path("/proc/sys/net/ipv4/tcp_congestion_control")),
        "python": platform.python_version(),
        "kvferry": installed_version("kvferry"),
        "copy_loop": "compiled" if IS_COMPILED else "python",
    }


def too_busy() -> str:
    """Say why figures would mean nothing now; empty if the machine has a core to spare."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores:
        return ""
    return (
        f"the load average is {load:.1f} on {cores} cores, so the figures say more about other programs; "
        "end them and measure again"
    )
