"""The demo's command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ..node.options import DEFAULT_CONNECTOR, add_option, words_of
from ..web.serving import StartupError

#: Enough for some prompts, and at once there.
DEFAULT_NUM_BLOCKS = 512
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

#: Options about the connector, for the prefill and the decode node.
PAIR_OPTIONS = ("connector", "load-failure-policy", "connector-module", "connector-option")
#: Options for every node.
NODE_OPTIONS = (
    *("model", "layout", "page-order", "block-size", "num-blocks", "max-num-batched-tokens"),
    *("dtype", "device", "threads"),
)
#: What one node of the pair can have for itself.
OWN_OPTIONS = (
    *("tensor-parallel-size", "pipeline-parallel-size"),
    *("layout", "page-order", "block-size"),
)


@dataclass(frozen=True)
class DemoOptions:
    """The parsed command line.

    Attributes:
        prompts: At least one.
        layout: Of the decode node.
        json_path: Where the records go; None: nowhere.
        concurrency: Prompts that are asked at once.
        pair_arguments: Options of prefill and decode node about the connector.
        own_arguments: Options of the prefill node alone, and of the decode node alone.
        router_arguments: Options of the router.
        node_arguments: Options of every node.
        dtype, device: Two of these: where and in what the nodes compute.
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
    dtype: str
    device: str


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
        pair_arguments=words_of(options, PAIR_OPTIONS),
        own_arguments=(
            words_of(options, OWN_OPTIONS, prefix="prefill-"),
            words_of(options, OWN_OPTIONS, prefix="decode-"),
        ),
        router_arguments=("--overlap",) if options.overlap else (),
        node_arguments=words_of(options, NODE_OPTIONS),
        dtype=options.dtype,
        device=options.device,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="disagg_pair.py",
        description="Answer prompts by a prefill node and a decode node with a router in front, then by a single "
        "node, and hold the two against each other. Everything runs on this machine and ends with this program.",
        allow_abbrev=False,
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
    _add_node_arguments(parser.add_argument_group("nodes"))
    return parser


def _add_connector_arguments(group: argparse._ArgumentGroup) -> None:
    for name in PAIR_OPTIONS:
        add_option(group, name)
    group.set_defaults(connector=DEFAULT_CONNECTOR)
    group.add_argument(
        "--overlap",
        action="store_true",
        help="let the KV cache cross chunk by chunk, while the rest of the prompt is computed",
    )


def _add_node_arguments(group: argparse._ArgumentGroup) -> None:
    for name in NODE_OPTIONS:
        add_option(group, name)
    group.set_defaults(num_blocks=DEFAULT_NUM_BLOCKS)
    for role, name in product(("prefill", "decode"), OWN_OPTIONS):
        own = {"default": None, "help": f"--{name} of the {role} node alone"}
        add_option(group, name, prefix=f"{role}-", **own)
    group.add_argument(
        "--start-timeout-s",
        type=float,
        default=300.0,
        metavar="S",
        help="a node that is not ready by then has failed (default: %(default)g)",
    )


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
