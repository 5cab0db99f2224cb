"""Compare a pair of vLLM servers with a single one: start them, ask both, and compare the answers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from kvferry.reference.demo import near_tie
from kvferry.reference.demo.client import Answer, ask, complete
from kvferry.reference.demo.launcher import LaunchedProcess, Launcher, LaunchError
from kvferry.reference.engine.default_model import default_model_folder
from kvferry.web.connections import ConnectionLimits
from kvferry.web.serving import bind, serving

from .cluster import KVFERRY, start_vllm
from .figures import Transfers, read_transfers
from .proxy import proxy_application

STORY = (
    "A short history of the lighthouse: long before there were maps of the coast, people lit fires on hills so that "
    "ships would find their way home at night. Then came towers of stone, and in them"
)
PROMPTS = ("The capital of France is", STORY)
WARM_UP_PROMPT = (
    "Nothing to see here yet: this text only wakes the nodes up before anyone looks at the clock."
)
NODE_ARGUMENTS = ("--dtype", "float32", "--block-size", "32", "--max-model-len", "2048", "--enforce-eager")
START_TIMEOUT_S = 600.0
#: Fields of a completion that make vLLM return log-probabilities. Their differences are those of the logits.
ASK_FOR_LOGITS = {"logprobs": 2, "return_tokens_as_token_ids": True}


@dataclass(frozen=True)
class Comparison:
    """One prompt and its two answers.

    Attributes:
        front: What stood in front of the pair: `"router"` or `"proxy"`.
        tokens: The comparison of the tokens. None if one of the answers failed.
    """

    front: str
    prompt: str
    pair: Answer
    single: Answer
    tokens: near_tie.Comparison | None

    @property
    def is_identical(self) -> bool:
        return self.tokens is not None and self.tokens.is_identical

    @property
    def is_right(self) -> bool:
        """Whether the pair's tokens are those of the single node, apart from near-ties of logits."""
        return self.tokens is not None and self.tokens.mismatch is None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison.

    Returns:
        The exit status: 0 if the pair answered every prompt with the single node's tokens, apart from near-ties of logits;
        1 if it did not; 2 if a process could not start.
    """
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        comparisons, transfers = _run(options)
    except LaunchError as error:
        print(f"vllm_pair: error: {error}", file=sys.stderr)
        return 2
    _show(comparisons, transfers)
    if options.json is not None:
        _write_json(options.json, comparisons, transfers)
    has_moved = transfers.num_loads >= len(comparisons)
    return 0 if has_moved and all(comparison.is_right for comparison in comparisons) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm_pair", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--model", default="", help="a model's folder or name (default: the model of the other examples)"
    )
    parser.add_argument("--transport", default="shm", help="kvferry's transport (default: %(default)s)")
    parser.add_argument(
        "--front",
        action="append",
        choices=("router", "proxy"),
        help="what to put in front of the pair: our router, or a proxy like vLLM's example; may be repeated "
        "(default: router)",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="a prompt to continue; may be repeated (default: two prompts)",
    )
    parser.add_argument(
        "--max-tokens", type=int, default=32, help="longest answer in tokens (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    return parser


def _run(options: argparse.Namespace) -> tuple[list[Comparison], Transfers]:
    model = options.model or str(default_model_folder())
    transfer = {**KVFERRY, "kv_connector_extra_config": {"transport": options.transport}}
    with Launcher() as launcher:
        print("starting a prefill node, a decode node and, to compare, a single node of vLLM", flush=True)
        prefill = start_vllm(launcher, "prefill node", model, NODE_ARGUMENTS, transfer)
        decode = start_vllm(launcher, "decode node", model, NODE_ARGUMENTS, transfer)
        single = start_vllm(launcher, "single node", model, NODE_ARGUMENTS, None)
        nodes = [prefill, decode, single]
        launcher.wait_listening(nodes, START_TIMEOUT_S)
        launcher.wait_ready(nodes, START_TIMEOUT_S, _say_ready)
        return asyncio.run(_compare(launcher, options, prefill, decode, single))


def _say_ready(process: LaunchedProcess, seconds: float) -> None:
    print(f"  {process.name:<12} ready after {seconds:5.1f} s  {process.url}", flush=True)


async def _compare(
    launcher: Launcher,
    options: argparse.Namespace,
    prefill: LaunchedProcess,
    decode: LaunchedProcess,
    single: LaunchedProcess,
) -> tuple[list[Comparison], Transfers]:
    comparisons: list[Comparison] = []
    async with aiohttp.ClientSession() as session:
        await ask(session, single.url, WARM_UP_PROMPT, 2, _ignore)
        for front in options.front or ["router"]:
            async with in_front_of(front, launcher, prefill, decode) as url:
                await ask(session, url, WARM_UP_PROMPT, 2, _ignore)
                for prompt in options.prompt or PROMPTS:
                    print(f"\n{prompt}", end="", flush=True)
                    pair = await ask(session, url, prompt, options.max_tokens, _echo)
                    print(pair.error)
                    alone = await ask(session, single.url, prompt, options.max_tokens, _ignore)
                    tokens = await asyncio.to_thread(_compare_tokens, prompt, pair, alone, single)
                    comparisons.append(Comparison(front, prompt, pair, alone, tokens))
        return comparisons, await read_transfers(session, decode.url)


def _compare_tokens(
    prompt: str, pair: Answer, alone: Answer, single: LaunchedProcess
) -> near_tie.Comparison | None:
    """Compare two answers. None if one of them failed, or the single node no longer answers."""
    if pair.error or alone.error or not pair.token_ids:
        return None

    def ask_alone(prompt: str | Sequence[int], max_tokens: int) -> near_tie.Expectation:
        choice = complete(single.port, prompt, max_tokens=max_tokens, **ASK_FOR_LOGITS)["choices"][0]
        return near_tie.Expectation(choice["prompt_token_ids"], choice["token_ids"], top_logits(choice))

    try:
        return near_tie.compare(prompt, pair.token_ids, alone.token_ids, ask_alone)
    except (OSError, HTTPException, ValueError, LookupError) as error:
        print(f"cannot ask the single node for its logits: {type(error).__name__}: {error}")
        return None


def top_logits(choice: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Return the two largest logits of the first token of a completion with `ASK_FOR_LOGITS`."""
    likely = choice["logprobs"]["top_logprobs"][0].items()
    pairs = [(int(name.removeprefix("token_id:")), float(logprob)) for name, logprob in likely]
    return sorted(pairs, key=lambda pair: -pair[1])[:2]


def in_front_of(
    front: str, launcher: Launcher, prefill: LaunchedProcess, decode: LaunchedProcess
) -> contextlib.AbstractAsyncContextManager[str]:
    """Put `"router"` or `"proxy"` in front of a pair inside the block. Yields its URL."""
    return _router(launcher, prefill, decode) if front == "router" else _proxy(prefill, decode)


@contextlib.asynccontextmanager
async def _router(
    launcher: Launcher, prefill: LaunchedProcess, decode: LaunchedProcess
) -> AsyncIterator[str]:
    router = launcher.start_router("router", [prefill], [decode])
    await asyncio.to_thread(launcher.wait_listening, [router], START_TIMEOUT_S)
    await asyncio.to_thread(launcher.wait_ready, [router], START_TIMEOUT_S, _say_ready)
    yield router.url


@contextlib.asynccontextmanager
async def _proxy(prefill: LaunchedProcess, decode: LaunchedProcess) -> AsyncIterator[str]:
    app: web.Application = proxy_application(prefill.url, decode.url)
    with bind("127.0.0.1", 0) as listener:
        async with serving(app, listener, ConnectionLimits()):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def _echo(text: str) -> None:
    print(text, end="", flush=True)


def _ignore(text: str) -> None:
    return


def _show(comparisons: Sequence[Comparison], transfers: Transfers) -> None:
    print(f"\n{'front':>6}  {'prompt tokens':>13}  {'TTFT ms, pair':>13}  {'single':>8}  identical tokens")
    for comparison in comparisons:
        pair, single = comparison.pair, comparison.single
        print(
            f"{comparison.front:>6}  {pair.prompt_tokens:>13}  {pair.ttft_s * 1e3:>13.0f}  {single.ttft_s * 1e3:>8.0f}  "
            f"{'yes' if comparison.is_identical else 'near-tie' if comparison.is_right else 'NO'}"
        )
        if comparison.tokens is not None and not comparison.is_identical:
            print(comparison.tokens)
    print(f"the decode node: {transfers}", flush=True)


def _write_json(path: Path, comparisons: Sequence[Comparison], transfers: Transfers) -> None:
    requests = [
        {
            "front": comparison.front,
            "prompt_tokens": comparison.pair.prompt_tokens,
            "token_ids": comparison.pair.token_ids,
            "reference_token_ids": comparison.single.token_ids,
            "identical": comparison.is_identical,
            "ttft_s": comparison.pair.ttft_s,
            "reference_ttft_s": comparison.single.ttft_s,
            "error": comparison.pair.error or comparison.single.error,
        }
        for comparison in comparisons
    ]
    content = {"requests": requests, "transfers": dataclasses.asdict(transfers)}
    path.write_text(json.dumps(content, indent=2) + "\n")
