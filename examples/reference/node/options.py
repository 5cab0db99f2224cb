"""The options of a node that other programs take too, to pass them on: each is declared once."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from kvferry.connector.config import PageOrder

from ..engine.settings import DEFAULT_MODEL, DTYPES, Layout

DEFAULT_CONNECTOR = "shm"

_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "connector": {
        "metavar": "NAME",
        "help": f"registered connector (default: {DEFAULT_CONNECTOR})",
    },
    "connector-module": {"metavar": "MODULE", "help": "import path of an out-of-tree connector's module"},
    "connector-option": {
        "action": "append",
        "default": [],
        "metavar": "KEY=VALUE",
        "help": "an option of the connector; VALUE is JSON, or else taken as text; may be repeated",
    },
    "load-failure-policy": {
        "choices": ("recompute", "fail"),
        "help": "what becomes of a request whose KV cache cannot be loaded (default: recompute)",
    },
    "model": {
        "default": DEFAULT_MODEL,
        "metavar": "PATH",
        "help": "local folder of a Hugging Face decoder-only model (default: %(default)s, from the package index)",
    },
    "dtype": {
        "choices": DTYPES,
        "default": "auto",
        "help": "of weights and cache; auto is float32 on a CPU, bfloat16 on a GPU (default: %(default)s)",
    },
    "device": {"default": "cpu", "help": "cpu, cuda or cuda:N (default: %(default)s)"},
    "threads": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "threads of PyTorch; 0 is its own choice (default: 0)",
    },
    "tensor-parallel-size": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "worker processes over which each layer is spread, on the CPU (default: 1, none)",
    },
    "pipeline-parallel-size": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "stages over which the layers are spread, each of as many worker processes (default: 1, none)",
    },
    "layout": {
        "choices": get_args(Layout),
        "default": "uniform",
        "help": "uniform keeps one block of all layers in one run of bytes (default: %(default)s)",
    },
    "page-order": {
        "choices": get_args(PageOrder),
        "default": "NHD",
        "help": "tokens (N) or heads (H) first inside a page; nodes of either order pair (default: %(default)s)",
    },
    "block-size": {
        "type": int,
        "default": 16,
        "metavar": "N",
        "help": "tokens a block (default: %(default)s)",
    },
    "num-blocks": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "blocks of the pool; 0 is as many as a share of the memory holds (default: %(default)s)",
    },
    "max-num-batched-tokens": {
        "type": int,
        "default": 512,
        "metavar": "N",
        "help": "tokens of one step, thus the prefill chunk (default: %(default)s)",
    },
}
#: Names of an option that still work. `kv-cache-layout` was one of three things called a layout.
_FORMER_NAMES: Mapping[str, Sequence[str]] = {"page-order": ("kv-cache-layout",)}


def add_option(group: argparse._ArgumentGroup, name: str, *, prefix: str = "", **changes: Any) -> None:
    """Add `--name`, or `--{prefix}name`, as a node has it but for `changes`."""
    names = [name, *_FORMER_NAMES.get(name, ())]
    group.add_argument(*(f"--{prefix}{name}" for name in names), **{**_OPTIONS[name], **changes})


def words_of(options: argparse.Namespace, names: Sequence[str], *, prefix: str = "") -> tuple[str, ...]:
    """The words that give a node what was given here, where anything was."""

    def words() -> Iterator[str]:
        for name in names:
            given = getattr(options, f"{prefix}{name}".replace("-", "_"))
            for value in given if isinstance(given, list) else [given]:
                if value is not None:
                    yield from (f"--{name}", str(value))

    return tuple(words())
