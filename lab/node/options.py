"""Options of a node that other programs take as well and pass on. Each is declared once."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from ...router.http.serving import StartupError
from ...transports.checked import Refused, json_of
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
        "help": "an option of the connector; VALUE is JSON, or plain text if it is not valid JSON; may be repeated",
    },
    "load-failure-policy": {
        "choices": ("recompute", "fail"),
        "help": "recompute the prompt or fail the request if its KV cache cannot be loaded (default: recompute)",
    },
    "model": {
        "default": DEFAULT_MODEL,
        "metavar": "PATH",
        "help": "local folder of a Hugging Face decoder-only model (default: %(default)s, from the package index)",
    },
    "dtype": {
        "choices": DTYPES,
        "default": "auto",
        "help": "type of weights and cache; auto is float32 on a CPU, bfloat16 on a GPU (default: %(default)s)",
    },
    "device": {
        "default": "cpu",
        "help": "device of model and cache: cpu, cuda or cuda:N (default: %(default)s)",
    },
    "threads": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "threads of PyTorch; 0 lets PyTorch choose (default: 0)",
    },
    "tensor-parallel-size": {
        "type": int,
        "default": 1,
        "metavar": "N",
        "help": "worker processes that share each layer, on the CPU only; 1 means no extra process (default: 1)",
    },
    "layout": {
        "choices": get_args(Layout),
        "default": "uniform",
        "help": "layout of the pool: uniform keeps a block of all layers in one run of bytes (default: %(default)s)",
    },
    "block-size": {
        "type": int,
        "default": 16,
        "metavar": "N",
        "help": "tokens per block (default: %(default)s)",
    },
    "num-blocks": {
        "type": int,
        "default": 0,
        "metavar": "N",
        "help": "blocks of the pool; 0 takes as many as fit into a share of the memory (default: %(default)s)",
    },
    "max-num-batched-tokens": {
        "type": int,
        "default": 512,
        "metavar": "N",
        "help": "most tokens per step, which is also the size of a prefill chunk (default: %(default)s)",
    },
}


def add_option(group: argparse._ArgumentGroup, name: str) -> None:
    """Add `--name` as a node has it."""
    group.add_argument(f"--{name}", **_OPTIONS[name])


def words_of(options: argparse.Namespace, names: Sequence[str]) -> tuple[str, ...]:
    """Return the command line words that pass the given options on to a node."""

    def words() -> Iterator[str]:
        for name in names:
            given = getattr(options, name.replace("-", "_"))
            for value in given if isinstance(given, list) else [given]:
                if value is not None:
                    yield from (f"--{name}", str(value))

    return tuple(words())


def connector_options(pairs: Sequence[str]) -> dict[str, Any]:
    """Read the values of `--connector-option`.

    Raises:
        StartupError: one of them is not `KEY=VALUE`.
    """
    result: dict[str, Any] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not key or not separator:
            raise StartupError(f"--connector-option {pair!r}: expected KEY=VALUE")
        try:
            result[key] = json_of(text)
        except Refused:
            result[key] = text
    return result
