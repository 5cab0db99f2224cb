"""What this machine offers to handoffs: the kernel, its limits, network devices and GPUs.

Each check reads or tries one thing, in microseconds, and leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from kvferry.transports.copying import IS_COMPILED, IS_ORDERED
from kvferry.transports.machine import memory_of_this_process

#: `ok`; `note`: works, but something would be better otherwise; `missing`: this machine has none; `failed`: it is broken.
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


def machine(root: Path = Path("/")) -> list[Finding]:
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


# -- the kernel --------------------------------------------------------------------------------------


def _kernel(root: Path) -> Iterator[Finding]:
    yield _memfd()
    yield _ptrace(root)
    if IS_COMPILED:
        yield Finding("kernel", "copy loop", "ok", "compiled")
    else:
        yield Finding(
            "kernel",
            "copy loop",
            "note" if IS_ORDERED else "failed",
            "in Python: slower, and shm needs the compiled one on this processor" * (not IS_ORDERED)
            or "in Python, at about two thirds of the speed",
            "install a C compiler and reinstall kvferry, or install the wheel for this platform",
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != _INFINITE and soft < _FEW_DESCRIPTORS
    yield Finding(
        "kernel",
        "descriptors",
        "note" if few else "ok",
        f"{soft} (hard limit {hard})",
        f"a node with many peers needs more: `ulimit -n 65536`, or LimitNOFILE=65536 (now {soft})"
        if few
        else "",
    )


def _memfd() -> Finding:
    """Try what `shm` does: a sealed file in memory."""
    try:
        descriptor = os.memfd_create("kvferry-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, 4096)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        finally:
            os.close(descriptor)
    except (AttributeError, OSError) as error:
        return Finding(
            "kernel",
            "memfd",
            "failed",
            f"no sealed files in memory: {error}",
            "use tcp or zeromq instead of shm",
        )
    return Finding("kernel", "memfd", "ok", "sealed files in memory")


def _ptrace(root: Path) -> Finding:
    """Read what Yama allows; path `shm-foreign` of the doctor tries it."""
    scope = _text(root / "proc/sys/kernel/yama/ptrace_scope")
    if scope in ("", "0"):
        found = f"kernel.yama.ptrace_scope={scope}" if scope else "not restricted by Yama"
        return Finding("kernel", "ptrace scope", "ok", f"{found}: processes of one user may read each other")
    return Finding(
        "kernel",
        "ptrace scope",
        "note",
        f"kernel.yama.ptrace_scope={scope}: other processes' ordinary memory needs CAP_SYS_PTRACE",
        "only pools that shm did not allocate need it: let the transport allocate the pool, or set "
        "kernel.yama.ptrace_scope=0",
    )


# -- memory ------------------------------------------------------------------------------------------


def _memory(root: Path) -> Iterator[Finding]:
    total, free = memory_of_this_process()
    yield Finding("memory", "available", "ok", f"{_size(free)} of {_size(total)}")
    yield _huge_pages(root, "huge pages", "enabled", "pools of ordinary memory")
    yield _huge_pages(root, "huge pages, shared", "shmem_enabled", "pools that shm allocates")
    yield _shm_folder(root)
    yield _memlock(root)


def _huge_pages(root: Path, name: str, file: str, what: str) -> Finding:
    text = _text(root / "sys/kernel/mm/transparent_hugepage" / file)
    chosen = next((word.strip("[]") for word in text.split() if word.startswith("[")), "")
    if not chosen:
        return Finding("memory", name, "missing", "this kernel has no transparent huge pages")
    if chosen == "never" and file == "enabled":
        remedy = (
            f"echo madvise > /sys/kernel/mm/transparent_hugepage/{file}: copies of {what} are then faster"
        )
        return Finding("memory", name, "note", chosen, remedy)
    # Of shared memory, shm collapses its pools itself (MADV_COLLAPSE), which works with "never" as well.
    collapses = chosen in ("never", "deny") and file == "shmem_enabled"
    return Finding(
        "memory", name, "ok", f"{chosen}; shm collapses its pools into them" if collapses else chosen
    )


def _shm_folder(root: Path) -> Finding:
    folder = root / "dev/shm"
    try:
        about = os.statvfs(folder)
    except OSError as error:
        return Finding(
            "memory",
            "/dev/shm",
            "note",
            f"not usable: {error.strerror}",
            "shm does not need it, but PyTorch, UCX and NIXL do: mount a tmpfs there",
        )
    total, free = about.f_blocks * about.f_frsize, about.f_bavail * about.f_frsize
    small = total <= _SMALL_SHM_BYTES
    remedy = (
        "shm does not need it, but PyTorch, UCX and NIXL do: `docker run --shm-size=1g` or a larger tmpfs"
    )
    return Finding(
        "memory",
        "/dev/shm",
        "note" if small else "ok",
        f"{_size(free)} of {_size(total)}",
        remedy if small else "",
    )


def _memlock(root: Path) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = "unlimited" if soft == _INFINITE else _size(soft)
    needed = soft != _INFINITE and any((root / "sys/class/infiniband").glob("*"))
    remedy = f"RDMA locks whole pools: `ulimit -l unlimited`, or LimitMEMLOCK=infinity (now {found})"
    return Finding("memory", "memlock", "note" if needed else "ok", found, remedy if needed else "")


# -- devices -----------------------------------------------------------------------------------------


def _rdma(root: Path) -> Iterator[Finding]:
    devices = sorted((root / "sys/class/infiniband").glob("*"))
    if not devices:
        yield Finding("devices", "RDMA", "missing", "no device in /sys/class/infiniband; the network is TCP")
    for device in devices:
        for port in sorted((device / "ports").glob("*")):
            state, rate = _text(port / "state"), _text(port / "rate")
            is_up = state.endswith("ACTIVE")
            yield Finding(
                "devices",
                f"RDMA {device.name}:{port.name}",
                "ok" if is_up else "note",
                ", ".join(filter(None, (state.rpartition(": ")[2], rate, _text(port / "link_layer")))),
                "" if is_up else "bring the port up, or choose another device with net_devices",
            )


def _gpus(root: Path) -> Iterator[Finding]:
    """Ask CUDA's driver itself, which needs neither PyTorch nor bindings, and creates no context."""
    has_device = any((root / "dev").glob("nvidia[0-9]*"))
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        if has_device:
            remedy = "install the driver's library, or run the container with NVIDIA's toolkit (`--gpus all`)"
            yield Finding("devices", "GPU", "failed", "there is a device, but no libcuda.so.1", remedy)
        else:
            yield Finding("devices", "GPU", "missing", "no NVIDIA driver; caches are in main memory")
        return
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
