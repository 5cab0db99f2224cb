"""Run the demo: launch, ask the pair, ask the single node, compare, show."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

import aiohttp

from ...router.http.serving import EXIT_BAD_START, StartupError
from ...transports.errors import ConfigurationError
from ..client import Answer, ask
from ..engine.default_model import default_model_folder
from ..engine.progress import Elapsed
from ..engine.settings import DEFAULT_MODEL
from ..servers import LaunchedProcess, Launcher, LaunchError, start_vllm
from .cli import DEFAULT_PROMPTS, DemoOptions, options_of, parse_arguments
from .display import Streaming, say
from .load import show_load
from .near_tie import Comparison, ask_alone, compare, tolerance_of
from .report import (
    MAX_PROMPT_CHARS,
    Way,
    explain_slower,
    format_table,
    is_right,
    report_of,
    shortened,
    write_json,
)
from .vllm_server import ask_pair

#: Seconds that the nodes have to get ready.
START_TIMEOUT_S = 600.0
#: Seconds that a process has to end after it has reported that it fails.
EXIT_WAIT_S = 10.0
#: Seconds between two looks at the processes that `--keep` leaves running.
WATCH_INTERVAL_S = 0.5
WARM_UP_PROMPT = (
    "This prompt only makes the nodes compute their first step, which is much slower than later ones."
)


def main(arguments: Sequence[str] | None = None, program: str = "kvferry demo") -> int:
    """Run the demo.

    Args:
        program: The program's name in messages.

    Returns:
        The exit status: 0 if every answer has the single node's tokens, apart from near-ties of logits; 1 if
        not; 2 if something could not start; 128 + the signal's number if the demo was interrupted.
    """
    return _exit_status_of(program, lambda: parse_arguments(arguments, program))


def run(arguments: argparse.Namespace, program: str) -> int:
    """Run the demo with the options that a parser has read; see `main`."""
    return _exit_status_of(program, lambda: options_of(arguments))


def _exit_status_of(program: str, read_options: Callable[[], DemoOptions]) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    # A shell script starts background jobs with SIGINT ignored. The nodes must end after a SIGINT even then.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        options = read_options()
        _prepare_model(options.model)
        status = _run(options) if "questions" in options.parts else 0
        if "load" in options.parts and status == 0:
            arguments = (*options.pair_arguments, *options.node_arguments)
            status = 0 if show_load(arguments, DEFAULT_PROMPTS[1], START_TIMEOUT_S) else 1
        return status
    except (StartupError, LaunchError) as error:
        say(f"{program}: error: {error}")
        return EXIT_BAD_START
    except KeyboardInterrupt:
        say("\ninterrupted; everything that was started has ended")
        return 128 + signal.SIGINT


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _run(options: DemoOptions) -> int:
    with Launcher() as launcher:
        routers, decode, single = _start(launcher, options)
        answers = _ask_pair(routers, decode, options)
        references = _ask_single(single, options)
        with Elapsed("comparing the answers"):
            comparisons = [
                _compare(options.sent(prompt), answer, reference, single, options)
                for (prompt, _), answer, reference in zip(options.requests, answers, references, strict=True)
            ]
            ends = [process.describe_end(EXIT_WAIT_S) for process in launcher.processes]
        for end in filter(None, ends):
            say(end)
        if options.keep:
            status = _show(options, answers, references, comparisons)
            _keep(launcher, routers, single, options)
            return status
        with Elapsed("stopping the nodes"):
            launcher.close()
    return _show(options, answers, references, comparisons)


def _keep(
    launcher: Launcher,
    routers: Mapping[Way, LaunchedProcess],
    single: LaunchedProcess,
    options: DemoOptions,
) -> None:
    """Leave the pair running until Ctrl-C.

    A process that ends meanwhile is reported, and the rest goes on.
    """
    for stop in (single.hang_up, single.terminate):
        stop()
    url = next(iter(routers.values())).url
    # The default model was trained to chat. Another one may have no template for that.
    if options.model == DEFAULT_MODEL:
        path, field = "/v1/chat/completions", '"messages": [{"role": "user", "content": "What is a ferry?"}]'
    else:
        path, field = "/v1/completions", '"prompt": "The capital of France is"'
    body = f'{{{field}, "max_tokens": 32}}'
    say(
        "\nthe pair goes on until Ctrl-C. Send it a request, and watch the page:\n"
        f"  curl {url}{path} -H 'Content-Type: application/json' -d '{body}'"
    )
    _say_pages(routers)
    if options.engine == "reference":
        say(f"ask where the time of a request went, with the id of its answer:\n  kvferry explain ID {url}")
    running = [process for process in launcher.processes if process is not single]
    try:
        while running:
            time.sleep(WATCH_INTERVAL_S)
            for process in [process for process in running if not process.is_running]:
                running.remove(process)
                say(process.describe_end())
        say("every process has ended")
    except KeyboardInterrupt:
        say("\nstopping the pair")


def _say_pages(routers: Mapping[Way, LaunchedProcess]) -> None:
    for way, router in routers.items():
        which = f"{way.value}: " if len(routers) > 1 else ""
        say(f"  {which}{router.url}/")


def _ask_pair(
    routers: Mapping[Way, LaunchedProcess], decode: LaunchedProcess, options: DemoOptions
) -> list[Answer]:
    """Ask the pair all `options.requests`.

    Show the answers only the first time, because they should be the same again.
    """
    answers: dict[Way, list[Answer]] = {}
    for way, router in routers.items():
        if way is Way.DEFAULT:
            say("\nasking the pair in the router's default way: prompts chunk by chunk")
        # The salt keeps a way from finding the blocks of an earlier one in a node's prefix cache.
        salt = way.value if answers else ""
        ask_router = partial(ask_pair, decode=decode) if options.engine == "vllm" else ask
        if answers:
            say("\nto compare, asking the pair again: one node after the other")
            with Elapsed(way.value):
                answers[way] = _ask_all(router.url, options, None, salt, ask_router)
        else:
            answers[way] = _ask_all(router.url, options, Streaming(), salt, ask_router)
    return [answer for ways in zip(*answers.values(), strict=True) for answer in ways]


def _ask_single(single: LaunchedProcess, options: DemoOptions) -> list[Answer]:
    """Ask the single node each prompt once; returns its answers in the order of `options.requests`."""
    say(f"\nasking the single node the same ({len(options.prompts)} of them)")
    with Elapsed("asking the single node"):
        answers = _ask_all(single.url, options)
    return [answer for answer in answers for _ in options.ways]


def _compare(
    prompt: str, answer: Answer, reference: Answer, single: LaunchedProcess, options: DemoOptions
) -> Comparison | None:
    """Compare two answers; None if one is missing, or the single node can no longer be asked."""
    if answer.error or reference.error or not answer.token_ids:
        return None
    try:
        return compare(
            prompt,
            answer.token_ids,
            reference.token_ids,
            ask_alone(single.port),
            tolerance=tolerance_of(options.dtype, options.device),
        )
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        say(f"cannot ask the single node for its logits: {type(error).__name__}: {error}")
        return None


def _prepare_model(model: str) -> None:
    """Convert the default model here rather than in a node, so that the user sees the time it takes."""
    if model != DEFAULT_MODEL:
        return
    try:
        default_model_folder()
    except ConfigurationError as error:
        raise StartupError(str(error)) from error


def _start(
    launcher: Launcher, options: DemoOptions
) -> tuple[Mapping[Way, LaunchedProcess], LaunchedProcess, LaunchedProcess]:
    """Start everything and wait until it is ready.

    Returns:
        The routers, one for each of `options.ways`, the decode node, and the single node.
    """
    say("starting a prefill node, a decode node, a router and, to compare, a single node")
    admin = ("--dev",) if options.keep and options.engine == "reference" else ()
    pair_arguments = (*options.pair_arguments, *options.node_arguments, *admin)
    prefill, decode = (
        _start_node(launcher, options, role, *pair_arguments, *own_arguments)
        for role, own_arguments in zip(("prefill", "decode"), options.own_arguments, strict=True)
    )
    single = _start_node(launcher, options, "single", *options.node_arguments)
    with Elapsed("starting the nodes") as waiting:
        launcher.wait_listening([prefill, decode], START_TIMEOUT_S)
        routers = {
            way: _start_router(launcher, prefill, decode, options, way, *admin) for way in options.ways
        }
        late = [prefill, decode, single, *routers.values()]

        def note_ready(process: LaunchedProcess, seconds: float) -> None:
            waiting.say(f"  {process.name:<19} ready after {seconds:4.1f} s  {process.url}")
            late.remove(process)
            waiting.update("waiting for the " + " and the ".join(each.name for each in late))

        launcher.wait_ready(list(late), START_TIMEOUT_S, note_ready)
    say("each router serves a page that shows its nodes and requests:")
    _say_pages(routers)
    return routers, decode, single


def _start_node(launcher: Launcher, options: DemoOptions, role: str, *arguments: str) -> LaunchedProcess:
    if options.engine == "reference":
        return launcher.start_node(f"{role} node", role, *arguments)
    model = str(default_model_folder()) if options.model == DEFAULT_MODEL else options.model
    return start_vllm(launcher, f"{role} node", model, arguments, transfer=None)  # the arguments have it


def _start_router(
    launcher: Launcher,
    prefill: LaunchedProcess,
    decode: LaunchedProcess,
    options: DemoOptions,
    way: Way,
    *admin: str,
) -> LaunchedProcess:
    name = f"router {way.value}" if len(options.ways) > 1 else "router"
    return launcher.start_router(name, [prefill], [decode], *way.router_arguments, *admin)


def _ask_all(
    url: str,
    options: DemoOptions,
    display: Streaming | None = None,
    cache_salt: str = "",
    ask: Callable[..., Awaitable[Answer]] = ask,
) -> list[Answer]:
    """Ask every prompt, one after the other; returns the answers.

    Args:
        display: Shows the answers as they come; None shows nothing.
        ask: As `client.ask`.
    """
    try:
        return asyncio.run(_ask_each(url, options, display, cache_salt, ask))
    finally:
        if display is not None:
            display.close()


async def _ask_each(
    url: str,
    options: DemoOptions,
    display: Streaming | None,
    cache_salt: str,
    ask: Callable[..., Awaitable[Answer]],
) -> list[Answer]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        # PyTorch's first step takes much longer than the next ones, which would spoil the comparison of TTFT.
        # vLLM refuses an empty salt.
        fields: dict[str, Any] = {
            "return_token_ids": True,
            **({"cache_salt": cache_salt} if cache_salt else {}),
        }
        await ask(session, url, WARM_UP_PROMPT, 2, **fields)
        if display is not None:
            fields["on_text"] = display.text
        answers = []
        for prompt in options.prompts:
            if display is not None:
                display.begin(prompt)
            answers.append(await ask(session, url, options.sent(prompt), options.max_tokens, **fields))
            if display is not None:
                display.end(answers[-1])
        return answers


def _show(
    options: DemoOptions,
    answers: Sequence[Answer],
    references: Sequence[Answer],
    comparisons: Sequence[Comparison | None],
) -> int:
    """Print the table and what the table cannot say, and write the JSON; returns the exit status."""
    prompts = [prompt for prompt, _ in options.requests]
    reports = [
        report_of(answer, reference, comparison, options.connector, options.layout, way)
        for (_, way), answer, reference, comparison in zip(
            options.requests, answers, references, comparisons, strict=True
        )
    ]
    print(f"\n{format_table(prompts, answers, reports)}", flush=True)
    if slower := explain_slower(reports):
        print("\n" + slower, flush=True)
    if options.json_path is not None:
        write_json(options.json_path, reports)
    for reference in references[:: len(options.ways)]:
        if reference.error:
            say(f"the single node failed: {reference.error}")
    for prompt, answer, comparison in zip(prompts, answers, comparisons, strict=True):
        _explain(shortened(prompt, MAX_PROMPT_CHARS), answer, comparison)
    return 0 if all(map(is_right, reports)) else 1


def _explain(prompt: str, answer: Answer, comparison: Comparison | None) -> None:
    """Say how an answer differs from the single node's, and whether its transfer failed."""
    if comparison is not None and not comparison.is_identical:
        say(f"{prompt!r}: {comparison}")
    if answer.transfer_error:
        say(
            f"{prompt!r}: the transfer failed, so the decode node computed the prompt itself: {answer.transfer_error}"
        )
