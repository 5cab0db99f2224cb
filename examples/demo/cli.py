"""The demo's command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

from engine.settings import DEFAULT_MODEL, DTYPES, Layout
from kvferry.connector.config import PageOrder
from web.serving import StartupError

__all__ = ["DemoOptions", "parse_arguments"]

DEFAULT_CONNECTOR = "shm"
DEFAULT_PROMPTS = (
    (
        "Here is a short story about a ferry that carried letters between two islands.\n\n"
        "Every morning before sunrise, the captain"
    ),
    (
        "Ferries are among the oldest means of transport. Long before there were bridges, people and goods crossed "
        "rivers and lakes on rafts, and later on boats that were pulled along a rope from one bank to the other. A ferry "
        "is simple: it takes what others have packed, it carries it across, and it puts it down on the other side, "
        "complete and in order. It does not open the boxes.\n\n"
        "There are several reasons why ferries are still used today. First,"
    ),
)

#: What one node of the pair can have for itself.
OWN_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "tensor-parallel-size": {
        "type": int,
        "metavar": "N",
        "help": "processes over which each layer is spread (default: 1)",
    },
    "pipeline-parallel-size": {
        "type": int,
        "metavar": "N",
        "help": "stages over which the layers are spread (default: 1)",
    },
    "layout": {"choices": get_args(Layout), "help": "its own --layout"},
    "kv-cache-layout": {"choices": get_args(PageOrder), "help": "its own --kv-cache-layout"},
    "block-size": {"type": int, "metavar": "N", "help": "its own --block-size"},
}


@dataclass(frozen=True)
class DemoOptions:
    """What the command line said.

    Attributes:
        prompts: At least one.
        layout: Of the decode node.
        json_path: Where the records go; None: nowhere.
        concurrency: Prompts that are asked at once.
        pair_arguments: Options of prefill and decode node about the connector.
        own_arguments: Options of the prefill node alone, and of the decode node alone.
        router_arguments: Options of the router.
        node_arguments: Options of every node.
    """

    prompts: tuple[str, ...]
    max_tokens: int
    connector: str
    layout: str
    model: str
    json_path: Path | None
    concurrency: int
    start_timeout_s: float
    pair_arguments: tuple[str, ...]
    own_arguments: tuple[tuple[str, ...], tuple[str, ...]]
    router_arguments: tuple[str, ...]
    node_arguments: tuple[str, ...]


def parse_arguments(arguments: Sequence[str] | None = None) -> DemoOptions:
    """Read the command line.

    Raises:
        StartupError: a value cannot work.
        SystemExit: argparse answered itself, e.g. `--help`.
    """
    options = _parser().parse_args(arguments)
    if options.max_tokens < 1 or options.concurrency < 1:
        raise StartupError("--max-tokens and --concurrency must be at least 1")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise StartupError(f"--json {options.json}: the folder does not exist")
    return DemoOptions(
        prompts=_prompts(options),
        max_tokens=options.max_tokens,
        connector=options.connector,
        layout=options.decode_layout or options.layout,
        model=options.model,
        json_path=options.json,
        concurrency=options.concurrency,
        start_timeout_s=options.start_timeout_s,
        pair_arguments=_pair_arguments(options),
        own_arguments=(_own_arguments(options, "prefill"), _own_arguments(options, "decode")),
        router_arguments=("--overlap",) if options.overlap else (),
        node_arguments=_node_arguments(options),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="disagg_pair.py",
        description="Answer prompts by a prefill node and a decode node with a router in front, then by a single "
        "node, and hold the two against each other. Everything runs on this machine and ends with this program.",
    )
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt to continue; may be repeated"
    )
    prompts.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file with one prompt a line")
    parser.add_argument(
        "--max-tokens", type=int, default=64, metavar="N", help="longest answer (default: %(default)s)"
    )
    parser.add_argument(
        "--concurrency", type=int, default=1, metavar="N", help="prompts asked at once (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found to FILE")
    _add_connector_arguments(parser.add_argument_group("connector"))
    nodes = parser.add_argument_group("nodes")
    _add_node_arguments(nodes)
    _add_machine_arguments(nodes)
    return parser


def _add_connector_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--connector", default=DEFAULT_CONNECTOR, metavar="NAME", help="default: %(default)s")
    group.add_argument("--connector-module", default="", metavar="MODULE", help="of an out-of-tree connector")
    group.add_argument(
        "--connector-option", action="append", default=[], metavar="KEY=VALUE", help="may be repeated"
    )
    group.add_argument(
        "--load-failure-policy",
        choices=("recompute", "fail"),
        default="recompute",
        help="default: %(default)s",
    )
    group.add_argument(
        "--overlap",
        action="store_true",
        help="let the KV cache cross chunk by chunk, while the rest of the prompt is computed",
    )


def _add_node_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        metavar="PATH",
        help="local folder of a Hugging Face model (default: %(default)s, from the package index)",
    )
    group.add_argument(
        "--layout",
        choices=get_args(Layout),
        default="uniform",
        help="uniform keeps one block of all layers in one run of bytes (default: %(default)s)",
    )
    group.add_argument(
        "--kv-cache-layout",
        choices=get_args(PageOrder),
        default="NHD",
        help="tokens (N) or heads (H) first inside a page (default: %(default)s)",
    )
    group.add_argument(
        "--block-size", type=int, default=16, metavar="N", help="tokens a block (default: %(default)s)"
    )
    group.add_argument(
        "--num-blocks",
        type=int,
        default=512,
        metavar="N",
        help="blocks of each node's pool (default: %(default)s)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=512,
        metavar="N",
        help="the prefill chunk (default: %(default)s)",
    )
    group.add_argument(
        "--start-timeout-s",
        type=float,
        default=300.0,
        metavar="S",
        help="a node that is not ready by then has failed (default: %(default)g)",
    )


def _add_machine_arguments(group: argparse._ArgumentGroup) -> None:
    for role, (name, settings) in product(("prefill", "decode"), OWN_OPTIONS.items()):
        group.add_argument(f"--{role}-{name}", **{**settings, "help": f"{role} node: {settings['help']}"})
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="default: %(default)s")
    group.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    group.add_argument("--threads", type=int, default=0, metavar="N", help="threads of PyTorch in each node")


def _prompts(options: argparse.Namespace) -> tuple[str, ...]:
    if options.prompt_file is None:
        prompts = tuple(options.prompt or DEFAULT_PROMPTS)
    else:
        try:
            lines = options.prompt_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"--prompt-file {options.prompt_file}: {error}") from None
        prompts = tuple(line for line in lines if line.strip())
    if not prompts or not all(prompts):
        raise StartupError("there is no prompt, or an empty one")
    return prompts


def _pair_arguments(options: argparse.Namespace) -> tuple[str, ...]:
    result = ["--connector", options.connector, "--load-failure-policy", options.load_failure_policy]
    if options.connector_module:
        result += ["--connector-module", options.connector_module]
    for pair in options.connector_option:
        result += ["--connector-option", pair]
    return tuple(result)


def _own_arguments(options: argparse.Namespace, role: str) -> tuple[str, ...]:
    values = {name: getattr(options, f"{role}-{name}".replace("-", "_")) for name in OWN_OPTIONS}
    given = {name: value for name, value in values.items() if value is not None}
    return tuple(word for name, value in given.items() for word in (f"--{name}", str(value)))


def _node_arguments(options: argparse.Namespace) -> tuple[str, ...]:
    names = (
        "model",
        "layout",
        "kv_cache_layout",
        "block_size",
        "num_blocks",
        "max_num_batched_tokens",
        "dtype",
        "device",
        "threads",
    )
    pairs = [(f"--{name.replace('_', '-')}", str(getattr(options, name))) for name in names]
    return tuple(word for pair in pairs for word in pair)
