"""The UCX inside NIXL's wheel, which has InfiniBand support, made available to `ucxx`.

The wheel's libraries have names of their own, e.g. `libucp-1a2b3c4d.so.0.0.0`, and `ucxx` asks the dynamic loader for
`libucp.so.0`. The loader is satisfied by any loaded library that calls itself `libucp.so.0`. So `load` writes a *stub*,
a library that consists of this name and of a reference to the wheel's file, and loads it before `ucxx`. UCX finds its
plug-ins next to itself. No file stays behind, and no environment variable is needed.
"""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
from importlib.util import find_spec
from pathlib import Path

from .._host_libraries import keep_libnl_apart
from ..errors import BackendUnavailableError, ConfigurationError

#: What `ucxx` is linked with. All other libraries of UCX are found through it.
SONAME = "libucp.so.0"

_PACKAGES = ("nixl_cu12", "nixl_cu13")

#: Sizes of an ELF file's parts (64 bits): header, program header, entry of the dynamic section, symbol.
_HEADER, _SEGMENT, _ENTRY, _SYMBOL = 64, 56, 16, 24


def load() -> None:
    """Load the UCX of NIXL's wheel in such a way that `ucxx` uses it. `ucxx` must not be imported yet.

    Raises:
        BackendUnavailableError: NIXL is not installed, or its wheel has no UCX that can be loaded.
        ConfigurationError: this process has loaded another UCX already. It stays in use.
    """
    if _is_loaded():
        raise ConfigurationError(
            f"library='nixl': this process has already loaded another {SONAME}; make the first transport 'ucx' of the "
            "process with library='nixl', before anything imports ucxx",
            key="library",
            value="nixl",
        )
    libucp = _find()
    keep_libnl_apart()
    try:
        with libucp.open("rb") as file:
            image = stub(SONAME, str(libucp), file.read(_HEADER))
        with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
            path = Path(folder, SONAME)
            path.write_bytes(image)
            ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendUnavailableError(
            f"library='nixl': the UCX of NIXL's wheel cannot be loaded: {error}; reinstall NIXL, or remove the option"
        ) from error


def _is_loaded() -> bool:
    try:
        ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _find() -> Path:
    """Return the path of the wheel's `libucp`."""
    for package in _PACKAGES:
        spec = find_spec(package)
        if spec is not None and spec.origin is not None:
            # `auditwheel` puts the libraries of a wheel into a folder next to its package.
            folder = Path(spec.origin).parent.with_name(f"{package}.libs")
            for found in folder.glob("libucp-*.so*"):
                return found.resolve()
    raise BackendUnavailableError(
        "library='nixl' needs NIXL's wheel, which has a UCX inside, and none is installed: `pip install nixl-cu12`, or "
        "`nixl-cu13`; either works without CUDA"
    )


def stub(soname: str, needed: str, like: bytes) -> bytes:
    """Return a shared library without code that is called `soname` and needs the library `needed`.

    Args:
        needed: A path. The loader follows it as it is, because it contains a slash.
        like: The first 64 bytes of a library for this machine. They name its architecture.
    """
    order = "<" if like[5] == 1 else ">"
    machine = struct.unpack_from(f"{order}H", like, 18)[0]
    flags = struct.unpack_from(f"{order}I", like, 48)[0]
    strings = b"\0".join([b"", soname.encode(), os.fsencode(needed), b""])
    strings = strings.ljust(-(-len(strings) // 8) * 8, b"\0")
    dynamic = _HEADER + 3 * _SEGMENT
    names = dynamic + 7 * _ENTRY
    symbols = names + len(strings)
    end = symbols + _SYMBOL
    entries = (
        (1, 1 + len(soname) + 1),  # DT_NEEDED
        (14, 1),  # DT_SONAME
        (5, names),  # DT_STRTAB
        (10, len(strings)),  # DT_STRSZ
        (6, symbols),  # DT_SYMTAB, whose only symbol is the null symbol
        (11, _SYMBOL),  # DT_SYMENT
        (0, 0),
    )
    segments = (
        # PT_LOAD: the whole file. It is writable, because some loaders relocate the entries in place.
        (1, 0, end, 1 << 16),
        (2, dynamic, len(entries) * _ENTRY, 8),  # PT_DYNAMIC
        # PT_GNU_STACK. Without it the loader would make the stack executable.
        (0x6474E551, 0, 0, 16),
    )
    read_write = 6
    sizes = (_HEADER, _SEGMENT, len(segments), 64, 0, 0)
    shared_library = 3
    header = struct.pack(f"{order}HHIQQQIHHHHHH", shared_library, machine, 1, 0, _HEADER, 0, flags, *sizes)
    parts = [like[:16], header]
    for kind, offset, size, alignment in segments:
        parts.append(
            struct.pack(f"{order}IIQQQQQQ", kind, read_write, offset, offset, offset, size, size, alignment)
        )
    parts.extend(struct.pack(f"{order}QQ", *entry) for entry in entries)
    return b"".join([*parts, strings, bytes(_SYMBOL)])
