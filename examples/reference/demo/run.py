"""The demo from start to end: launch, ask the pair, ask the single node, compare, show."""

from __future__ import annotations

import asyncio
import http.client
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import aiohttp

from kvferry.transports.errors import ConfigurationError

from ..engine.default_model import default_model_folder
from ..engine.settings import DEFAULT_MODEL
from ..web.serving import EXIT_BAD_START, StartupError
from .cli import DemoOptions, parse_arguments
from .client import Answer, ask, ask_alone
from .display import Display, Silent, Streaming, Whole, say
from .launcher import LaunchedProcess, Launcher, LaunchError
from .near_tie import Comparison, compare, tolerance_of
from .report import MAX_PROMPT_CHARS, format_table, report_of, shortened, write_json

#: A process that says that it fails ends within this time.
DYING_S = 10.0
WARM_UP_PROMPT = (
    "Nothing to see here yet: this text only wakes both nodes up before anyone looks at the clock."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo.

    Returns:
        The exit status: 0 when every request was answered with the single node's tokens, near-ties of logits apart, 1
        when not, 2 when something could not start, 128 + the signal's number when it was interrupted.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    # A script's background job starts with interrupts ignored; what it started must end all the same.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return _run(parse_arguments(arguments))
    except (StartupError, LaunchError) as error:
        say(f"disagg_pair.py: error: {error}")
        return EXIT_BAD_START
    except KeyboardInterrupt:
        say("\ninterrupted; everything that was started has ended")
        return 128 + signal.SIGINT


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _run(options: DemoOptions) -> int:
    _prepare_model(options.model)
    with Launcher() as launcher:
        router, single = _start(launcher, options)
        display = Streaming() if options.concurrency == 1 else Whole()
        answers = asyncio.run(_ask_all(router.url, options, display))
        say(f"\nasking the single node the same ({len(options.prompts)} of them)")
        references = asyncio.run(_ask_all(single.url, options, Silent()))
        comparisons = [
            _compare(prompt, answer, reference, single, tolerance_of(options.dtype, options.device))
            for prompt, answer, reference in zip(options.prompts, answers, references, strict=True)
        ]
        for process in launcher.processes:
            if obituary := process.obituary(DYING_S):
                say(obituary)
    return _show(options, answers, references, comparisons)


def _compare(
    prompt: str, answer: Answer, reference: Answer, single: LaunchedProcess, tolerance: float
) -> Comparison | None:
    """Compare two answers; None if there are not two, or the single node cannot be asked any more."""
    if answer.error or reference.error or not answer.token_ids:
        return None
    try:
        return compare(
            prompt,
            answer.token_ids,
            reference.token_ids,
            ask_alone(single.port),
            tolerance=tolerance,
        )
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        say(f"cannot ask the single node for its logits: {type(error).__name__}: {error}")
        return None


def _prepare_model(model: str) -> None:
    """Convert the default model here, where its progress can be seen, rather than in a node."""
    if model != DEFAULT_MODEL:
        return
    try:
        default_model_folder()
    except ConfigurationError as error:
        raise StartupError(str(error)) from error


def _start(launcher: Launcher, options: DemoOptions) -> tuple[LaunchedProcess, LaunchedProcess]:
    """Start the pair, the router and the single node; returns the last two."""
    say("starting a prefill node, a decode node, a router and, to compare, a single node")
    pair_arguments = (*options.pair_arguments, *options.node_arguments)
    prefill, decode = (
        launcher.start_node(f"{role} node", role, *pair_arguments, *own_arguments)
        for role, own_arguments in zip(("prefill", "decode"), options.own_arguments, strict=True)
    )
    single = launcher.start_node("single node", "single", *options.node_arguments)
    launcher.wait_listening([prefill, decode], options.start_timeout_s)
    router = launcher.start_router("router", [prefill], [decode], *options.router_arguments)
    launcher.wait_ready(
        [prefill, decode, single, router],
        options.start_timeout_s,
        lambda process, seconds: say(f"  {process.name:<12} ready after {seconds:4.1f} s  {process.url}"),
    )
    return router, single


async def _ask_all(url: str, options: DemoOptions, display: Display) -> list[Answer]:
    """Ask every prompt, at most `concurrency` at once; answers in the prompts' order."""
    turns = asyncio.Semaphore(options.concurrency)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        # PyTorch's first step takes much longer than the next; TTFT is to be compared, not that.
        await ask(session, url, WARM_UP_PROMPT, 2, Silent().text)

        async def ask_one(prompt: str) -> Answer:
            async with turns:
                display.begin(prompt)
                answer = await ask(session, url, prompt, options.max_tokens, display.text)
                display.end(prompt, answer)
                return answer

        return await asyncio.gather(*(ask_one(prompt) for prompt in options.prompts))


def _show(
    options: DemoOptions,
    answers: Sequence[Answer],
    references: Sequence[Answer],
    comparisons: Sequence[Comparison | None],
) -> int:
    """Print the table and what it cannot say, write the JSON; returns the exit status."""
    reports = [
        report_of(*answered, options.connector, options.layout)
        for answered in zip(answers, references, comparisons, strict=True)
    ]
    print("\n" + format_table(options.prompts, answers, reports), flush=True)
    if options.json_path is not None:
        write_json(options.json_path, reports)
    for reference in references:
        if reference.error:
            say(f"the single node failed: {reference.error}")
    for prompt, answer, comparison in zip(options.prompts, answers, comparisons, strict=True):
        _explain(shortened(prompt, MAX_PROMPT_CHARS), answer, comparison)
    return 0 if all(report.is_right for report in reports) else 1


def _explain(prompt: str, answer: Answer, comparison: Comparison | None) -> None:
    """Say how an answer differs from the single node's, and, in any case, if its transfer failed."""
    if comparison is not None and not comparison.is_identical:
        say(f"{prompt!r}: {comparison}")
        moved = f"the transfer succeeded ({answer.transfer.get('num_bytes', 0)} bytes)"
        if not answer.transfer_error:
            say(f"{prompt!r}: {moved if answer.transfer else 'nothing was transferred'}")
    if answer.transfer_error:
        say(f"{prompt!r}: the transfer failed, the prompt was computed again: {answer.transfer_error}")
