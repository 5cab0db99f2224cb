"""The demo's command line."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from ...router.http.serving import StartupError
from ..engine.settings import DEFAULT_MODEL
from ..node.cli import configure as configure_node
from ..node.options import DEFAULT_CONNECTOR, add_option, connector_options, words_of
from ..servers import KVFERRY, VLLM_ARGUMENTS
from .report import Way

#: Enough for a few prompts, and quick to allocate.
DEFAULT_NUM_BLOCKS = 512
#: Small, so that the second default prompt takes several chunks and its transfer can overlap with the
#: prefill.
DEFAULT_CHUNK_TOKENS = 128
#: Questions that the default model answers sensibly and briefly. They are asked in `CHAT_TEMPLATE`.
DEFAULT_PROMPTS = (
    "What is a ferry? Answer in one sentence.",
    (
        "Here is a text.\n\n"
        "The crossing between the two towns of Norhaven and Suthaven is nine kilometres wide. For two hundred "
        "years the only way across was a rowing boat that took six passengers and left whenever it was full.\n\n"
        "In 1921 the towns bought a steam ferry together. They called it the Heron. It carried forty "
        "passengers and four carts, and it crossed eight times a day, in summer and in winter. The captain, "
        "Ada Lind, was known for two rules. Nothing was loaded before the manifest was signed, and no box was "
        "ever opened on board. What was packed in Norhaven arrived in Suthaven in the same order, complete "
        "and dry.\n\n"
        "The Heron carried letters, milk, bricks, sheep and once a church bell. The bell was too heavy for "
        "the crane, so the crew waited for high tide, when the deck lay level with the quay, and rolled it "
        "aboard on logs. It took a whole night. The bell still hangs in Suthaven and rings every day at noon.\n\n"
        "In 1954 the ferry was replaced by a larger one with a diesel engine, the Tern. The Tern could load "
        "cars through a gate in the bow while passengers were still boarding at the stern. This saved a "
        "quarter of an hour on every trip, because no one had to wait until everything else was on board. The "
        "timetable was changed from eight crossings a day to fourteen.\n\n"
        "A bridge was planned in 1978 but never built. The channel is deep, the ground is soft, and the towns "
        "found that a ferry was enough. Today the third ferry, the Swift, runs on batteries. It charges for "
        "ten minutes at each quay, which is as long as it takes to unload. The old Heron lies in Norhaven as "
        "a museum, and children may ring its brass bell.\n\n"
        "Name the captain of the Heron."
    ),
)
#: How a question to the default model is written: the ChatML that it was trained with.
CHAT_TEMPLATE = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
PLAIN_TEMPLATE = "{prompt}"

#: What the nodes are: our own engine, or `vllm serve` with kvferry as its connector.
ENGINES = ("reference", "vllm")
#: The parts of the demo: answers compared with the single node's, and answers that stream while long prompts
#: arrive.
PARTS = ("questions", "load")
#: Options about the connector, passed to the prefill node and the decode node.
PAIR_OPTIONS = ("connector", "load-failure-policy", "connector-module", "connector-option")
#: Options passed to every node.
NODE_OPTIONS = ("model", "device")
#: Options with further arguments, and the nodes that get them.
ARGUMENTS = {
    "serve-args": "every node, as of kvferry serve or vllm serve: --serve-args='--threads 2'",
    "prefill-args": "the prefill node alone",
    "decode-args": "the decode node alone",
}
#: What every node gets before the user's arguments, which override it.
DEFAULT_ARGUMENTS = ("--max-num-batched-tokens", str(DEFAULT_CHUNK_TOKENS))
#: The same for nodes of the reference engine.
REFERENCE_ARGUMENTS = ("--num-blocks", str(DEFAULT_NUM_BLOCKS))


@dataclass(frozen=True)
class DemoOptions:
    """Hold the values of the command line.

    Attributes:
        prompts: At least one, as a person reads it.
        prompt_template: What is sent for a prompt: this text with the prompt instead of `{prompt}`.
        engine: What the nodes are, one of `ENGINES`.
        ways: How the pair is asked, one way after the other.
        layout: Layout of the decode node's cache.
        json_path: The file for the records; None writes no file.
        keep: Leave the pair running until Ctrl-C.
        parts: Of `PARTS`, those that are shown.
        pair_arguments: Options about the connector for the prefill and the decode node.
        own_arguments: Arguments of the prefill node alone, and of the decode node alone.
        node_arguments: Arguments of every node.
        dtype, device: As in `EngineSettings`. Near-ties depend on them.
    """

    prompts: tuple[str, ...]
    prompt_template: str
    engine: str
    ways: tuple[Way, ...]
    max_tokens: int
    connector: str
    layout: str
    model: str
    json_path: Path | None
    keep: bool
    parts: tuple[str, ...]
    pair_arguments: tuple[str, ...]
    own_arguments: tuple[tuple[str, ...], tuple[str, ...]]
    node_arguments: tuple[str, ...]
    dtype: str
    device: str

    @property
    def requests(self) -> tuple[tuple[str, Way], ...]:
        """What the pair is asked: each prompt, each way."""
        return tuple(product(self.prompts, self.ways))

    def sent(self, prompt: str) -> str:
        """Return what is sent to a node for a prompt."""
        return self.prompt_template.replace("{prompt}", prompt)


def parse_arguments(arguments: Sequence[str] | None = None, program: str = "kvferry demo") -> DemoOptions:
    """Read the command line of a program of this name.

    Raises:
        StartupError: a value cannot work.
        SystemExit: argparse has printed what the user asked for or did wrong, e.g. after `--help`.
    """
    parser = argparse.ArgumentParser(prog=program, allow_abbrev=False)
    configure(parser)
    return options_of(parser.parse_args(arguments))


def options_of(options: argparse.Namespace) -> DemoOptions:
    """Check what a parser with these options has read.

    Raises:
        StartupError: a value cannot work.
    """
    if options.max_tokens < 1:
        raise StartupError("--max-tokens must be at least 1")
    if options.prompt and not all(options.prompt):
        raise StartupError("a --prompt is empty: there is nothing to continue")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise StartupError(f"cannot write --json {str(options.json)!r}: its folder does not exist")
    if is_vllm := options.engine == "vllm":
        _require_options_of_vllm(options)
    first = VLLM_ARGUMENTS if is_vllm else (*words_of(options, NODE_OPTIONS), *REFERENCE_ARGUMENTS)
    node_arguments = (*first, *DEFAULT_ARGUMENTS, *options.serve_args)
    layout, dtype = _decode_node((*node_arguments, *options.decode_args), is_vllm=is_vllm)
    # A user's own prompt is continued as it is, and asked once unless the user wants otherwise.
    is_default = not options.prompt
    is_chat = is_default and options.model == DEFAULT_MODEL
    return DemoOptions(
        prompts=tuple(options.prompt or DEFAULT_PROMPTS),
        prompt_template=CHAT_TEMPLATE if is_chat else PLAIN_TEMPLATE,
        engine=options.engine,
        # Both, so that the table shows what the router's default way is worth. The default comes first: users
        # see its answers as they come, and `--keep` names its router.
        ways=(Way.DEFAULT, Way.IN_TURN) if is_default else (Way.DEFAULT,),
        max_tokens=options.max_tokens,
        connector=options.connector,
        layout=layout,
        model=options.model,
        json_path=options.json,
        keep=options.keep,
        parts=_parts(options, is_default),
        pair_arguments=_transfer_of_vllm(options) if is_vllm else words_of(options, PAIR_OPTIONS),
        own_arguments=(tuple(options.prefill_args), tuple(options.decode_args)),
        node_arguments=node_arguments,
        dtype=dtype,
        device=options.device,
    )


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the demo."""
    parser.description = (
        "Answer prompts with a prefill node and a decode node behind a router, then with a single node, and "
        "compare the answers. Everything runs on this machine and ends with this program."
    )
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt to continue; may be repeated (default: two questions)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=64,
        metavar="N",
        help="longest answer, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="leave the pair and its router running after the demo, until Ctrl-C (default: stop everything)",
    )
    parser.add_argument(
        "--only",
        choices=PARTS,
        help="show one part: questions, with the answers compared with a single node's; or load, which is how answers stream "
        "while long prompts arrive (default: both, unless a --prompt, --keep or vLLM is asked for)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one record per request to FILE")
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="engine of the nodes; vllm: run this with the Python of vLLM's environment (default: %(default)s)",
    )
    _add_connector_arguments(parser.add_argument_group("connector"))
    _add_node_arguments(parser.add_argument_group("nodes"))


def _add_connector_arguments(group: argparse._ArgumentGroup) -> None:
    for name in PAIR_OPTIONS:
        add_option(group, name)
    group.set_defaults(connector=DEFAULT_CONNECTOR)


def _add_node_arguments(group: argparse._ArgumentGroup) -> None:
    for name in NODE_OPTIONS:
        add_option(group, name)
    for name, whose in ARGUMENTS.items():
        about = f"further arguments of {whose}"
        group.add_argument(f"--{name}", type=shlex.split, default=[], metavar="ARGS", help=about)


def _decode_node(words: Sequence[str], *, is_vllm: bool) -> tuple[str, str]:
    """Return the layout and the dtype of the decode node with these arguments, which a node would
    read alike.
    """
    parser = argparse.ArgumentParser(
        prog="--serve-args or --decode-args",
        usage="kvferry serve OPTIONS",
        allow_abbrev=False,
        add_help=False,
    )
    if is_vllm:
        add_option(parser.add_argument_group(), "dtype")
        return "vLLM's", parser.parse_known_args(words)[0].dtype
    configure_node(parser)
    options = parser.parse_args(words)
    return options.layout, options.dtype


def _require_options_of_vllm(options: argparse.Namespace) -> None:
    """Refuse what the demo cannot do with vLLM.

    Raises:
        StartupError: an option is not at its default, and belongs to the reference engine.
    """
    parser = argparse.ArgumentParser()
    configure(parser)
    for name in ("device", "connector-module"):
        attribute = name.replace("-", "_")
        if getattr(options, attribute) != parser.get_default(attribute):
            raise StartupError(f"cannot use --{name} with --engine vllm; leave it out")


def _transfer_of_vllm(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the arguments by which a node of vLLM has kvferry as its connector."""
    transfer = {
        **KVFERRY,
        "kv_load_failure_policy": options.load_failure_policy or "recompute",
        "kv_connector_extra_config": {
            "transport": options.connector,
            **connector_options(options.connector_option),
        },
    }
    return ("--kv-transfer-config", json.dumps(transfer))


def _parts(options: argparse.Namespace, is_default: bool) -> tuple[str, ...]:
    """Show everything, unless the user wants a part, or something that the load does not have.

    Raises:
        StartupError: the load cannot be shown with these options.
    """
    has_load = options.engine == "reference" and not options.keep
    if options.only == "load" and not has_load:
        raise StartupError("cannot use --only load with --engine vllm or --keep; leave one out")
    if options.only:
        return (options.only,)
    return PARTS if is_default and has_load else ("questions",)
