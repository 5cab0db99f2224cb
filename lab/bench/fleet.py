"""Compare ways to use the same nodes: plain nodes behind a load balancer, and prefill and decode nodes behind
kvferry's router.

    .venv-vllm/bin/python -m kvferry.lab.bench.fleet [--engine vllm|reference] [--ways NAME ...]
        [--loads NAME ...] [--trace FILE ...] [--requests N] [--rounds N] [--json FILE]

Every node has the role kv_both and one core of its own, and every way uses all nodes, so figures per core
compare like with like. The nodes are started once. In each round every way takes the same load: the same
lengths and arrivals, but other tokens, so that no way finds the prompts of another one in a node's prefix
cache. The order of the ways rotates from round to round. The client and the balancer or router have no core
of their own; they share those of the nodes.

Requests do not wait for each other: they arrive by a seeded Poisson process, or as a trace says. How fast
they arrive follows from `--intensity`: 1 means that the nodes would be busy all the time if each of them took
one request at a time. Times count from the moment when a request is due. Only the next turn of a conversation
waits for the answer to the turn before.

A request is *good* if it keeps two limits, which are multiples of what one idle node takes: the TTFT of a
prompt of the same length of which nothing is cached, and the mean time between two tokens (ITL). Goodput is
the number of good requests per second and core.

The balancers are the simplest that there are, a few lines in this file. Another way of the router is one more
row of `WAYS`, and another load one more row of `LOADS`. NixlConnector's nodes take part if `nixl` can be
imported. Needs two cores.

Without options it takes a quarter of an hour, and says for each load how `auto` stands beside the best fixed
way. Believe a difference only if it is larger than that of the rounds. The last column says how long nodes
waited for their cores, as a share of the time that they ran. It is large if other programs had the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from kvferry.lab import client
from kvferry.lab.client import Answer, BrokenAnswerError
from kvferry.lab.demo.load import on_core
from kvferry.lab.engine.default_model import default_model_folder
from kvferry.lab.plan.costs import Costs, read_costs, write_costs
from kvferry.lab.plan.loads import Conversation, Turn, read_trace_file, sizes
from kvferry.lab.plan.measuring import measure
from kvferry.lab.servers import KVFERRY, LaunchedProcess, Launcher, LaunchError, free_port, start_vllm
from kvferry.router.http.access import NodeAccess

from .fleet_figures import (
    FIRST_TOKEN,
    LOADS,
    Unloaded,
    comparison,
    figures_of,
    paced,
    predict,
    prompt_tokens,
    row_of,
    standing,
    table,
)
from .vllm_pair import ENVIRONMENT, settled, write_random_model

BLOCK_SIZE = 32
MAX_REQUESTS = 32
NUM_NODES = 2
#: Tokens in a node's cache.
POOL_TOKENS = 16384
REQUEST_TIMEOUT_S = 300.0
START_TIMEOUT_S, ROUTER_TIMEOUT_S = 900.0, 60.0
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


# -- nodes -------------------------------------------------------------------------------------------


def start_nodes(
    launcher: Launcher, options: argparse.Namespace, model: Path, longest: int, connector: str
) -> list[LaunchedProcess]:
    """Start as many nodes as there shall be, each on its core, and wait until they are ready.

    Args:
        longest: Tokens of the longest prompt with its answer.
        connector: "kvferry" or "nixl".
    """
    limits = ["--max-model-len", str(-(-(longest + 1) // BLOCK_SIZE) * BLOCK_SIZE)]
    limits += ["--max-num-batched-tokens", str(options.chunk_tokens), "--max-num-seqs", str(MAX_REQUESTS)]
    limits += ["--dtype", "float32", "--block-size", str(BLOCK_SIZE)]
    num_blocks = str(POOL_TOKENS // BLOCK_SIZE)
    cores = sorted(os.sched_getaffinity(0))[:NUM_NODES]
    nodes = []
    for number, core in enumerate(cores):
        name = f"{connector} node {number}"
        with on_core(core):
            if options.engine == "reference":
                of_engine = ("--num-blocks", num_blocks, "--threads", "1", "--log-level", "warning")
                named = ("--model", str(model), "--served-model-name", "model")
                nodes.append(launcher.start_node(name, "both", *named, *limits, *of_engine))
            else:
                more = ("--enforce-eager", "--disable-uvicorn-access-log", "--num-gpu-blocks-override")
                of_engine = (*more, num_blocks, "--distributed-executor-backend", "uni")
                side_channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
                transfer = KVFERRY if connector == "kvferry" else NIXL
                environment = {**ENVIRONMENT, **side_channel}
                nodes.append(
                    start_vllm(
                        launcher, name, str(model), [*limits, *of_engine], transfer, environment=environment
                    )
                )
    launcher.wait_ready(nodes, START_TIMEOUT_S)
    for node, core in zip(nodes, cores, strict=True):
        node.pin({core})  # NixlConnector binds all its engines to the same one
    return nodes


#: What is counted → the nodes' counters, as `totals_of` names them, and whether they are added or taken off.
COUNTERS: Mapping[str, Mapping[str, int]] = {
    "computed_tokens": {
        "vllm:prompt_tokens_by_source_total local_compute": 1,
        "kvferry_engine_prompt_tokens_total": 1,
        "kvferry_engine_cached_tokens_total": -1,
        "kvferry_engine_loaded_tokens_total": -1,
    },
    "moved_bytes": {"kvferry_load_bytes_sum": 1, "vllm:nixl_bytes_transferred_sum": 1},
    "failed_loads": {"kvferry_load_failures_total": 1},
}


def counters(totals: Mapping[str, float]) -> dict[str, float]:
    """Return what is counted among the nodes' metrics. Prompt tokens are computed if no cache had them."""
    return {
        what: sum(sign * totals.get(name, 0.0) for name, sign in counted.items())
        for what, counted in COUNTERS.items()
    }


def core_times(nodes: Sequence[LaunchedProcess]) -> dict[str, float]:
    """Return how many seconds the threads of all nodes ran, and waited while others had their core."""
    ran = waited = 0
    for pid in (pid for node in nodes for pid in node.pids):
        for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # the thread has ended
                times = file.read_text().split()
                ran, waited = ran + int(times[0]), waited + int(times[1])
    return {"ran_s": ran / 1e9, "waited_s": waited / 1e9}


# -- ways --------------------------------------------------------------------------------------------

#: In-flight requests by node, and the number of requests so far → the node that takes the next one.
Choice = Callable[[Mapping[str, int], int], str]


@dataclass(frozen=True)
class Way:
    """A way to use the nodes.

    Attributes:
        choose: The balancer's choice; None for kvferry's router.
        has_roles: Whether the first node is a prefill node for the router and the second one a decode node.
            Otherwise it decides per request which node does what.
        connector: Whose nodes it needs.
    """

    choose: Choice | None = None
    has_roles: bool = False
    connector: str = "kvferry"


WAYS: Mapping[str, Way] = {
    "round-robin": Way(lambda in_flight, number: [*in_flight][number % len(in_flight)]),
    "least-load": Way(lambda in_flight, number: min(in_flight, key=lambda url: in_flight[url])),
    "pair-1+1": Way(has_roles=True),
    "auto": Way(),
    "nixl-1+1": Way(has_roles=True, connector="nixl"),
}


@asynccontextmanager
async def balancing(urls: Sequence[str], choose: Choice) -> AsyncIterator[str]:
    """Run a balancer in this process, and yield its URL."""
    in_flight, numbers = dict.fromkeys(urls, 0), itertools.count()

    async def handle(request: web.Request) -> web.StreamResponse:
        url = choose(in_flight, next(numbers))
        in_flight[url] += 1
        try:
            headers = {"Content-Type": request.headers["Content-Type"]}
            async with session.post(url + request.path, data=await request.read(), headers=headers) as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                with contextlib.suppress(ConnectionResetError):  # the client has left
                    await response.prepare(request)
                    async for data in answer.content.iter_any():
                        await response.write(data)
                return response
        finally:
            in_flight[url] -= 1

    app = web.Application(client_max_size=2**26)
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    connections = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connections, timeout=aiohttp.ClientTimeout(None)) as session:
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            yield f"http://{host}:{port}"
        finally:
            await runner.cleanup()


@asynccontextmanager
async def in_front(way: Way, nodes: Sequence[LaunchedProcess], logs: Path) -> AsyncIterator[str]:
    """Run what stands in front of the nodes, and yield its URL."""
    if way.choose is not None:
        async with balancing([node.url for node in nodes], way.choose) as url:
            yield url
        return
    arguments = ["--port", "0", "--log-level", "warning"]
    roles = ("--prefill", "--decode") if way.has_roles else ("--node", "--node")
    for role, node in zip(roles, nodes, strict=True):
        arguments += [role, node.url]
    with Launcher(logs=logs) as launcher:  # not `start_router`, which checks nodes more often than by default
        router = launcher.start("router", "router", *arguments).wait_ready(ROUTER_TIMEOUT_S)
        try:
            yield router.url
        except BaseException as error:
            error.add_note(f"the end of the router's log:\n{router.log_tail}")
            raise


# -- asking ------------------------------------------------------------------------------------------


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    due: float,
    wants_ids: bool = False,
) -> Answer:
    """Stream one answer, whose times count from the moment when the request was due.

    Args:
        due: When the request should have been sent, by `time.perf_counter`.
        wants_ids: Ask for the answer's tokens.

    Raises:
        BrokenAnswerError: The answer failed, or has another length.
    """
    fields: dict[str, Any] = {"model": "model", "ignore_eos": True}
    if wants_ids:
        fields["return_token_ids"] = True
    answer = await client.ask(session, url, prompt, max_tokens, **fields)
    try:
        answer.require(max_tokens)
    except BrokenAnswerError as error:
        raise BrokenAnswerError(f"a request of {len(prompt)} tokens failed: {error}") from error
    if wants_ids and len(answer.token_ids) != max_tokens:
        raise BrokenAnswerError(f"an answer has {len(answer.token_ids)} ids of {max_tokens} tokens")
    answer.sent = due
    return answer


async def drive(
    session: aiohttp.ClientSession, url: str, plan: Sequence[Conversation], salt: str, vocabulary: int
) -> tuple[list[Answer], float]:
    """Send all requests of a plan when they are due.

    Return the answers and the seconds until the last of them ended.

    Raises:
        ExceptionGroup: Of `BrokenAnswerError`. The other requests have been cancelled.
    """
    answers: list[Answer] = []
    started = time.perf_counter()

    async def converse(turns: Conversation) -> None:
        due, context = started, list[int]()
        for turn in turns:
            due += turn.after
            context += prompt_tokens(salt, turn, vocabulary)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            answer = await ask(session, url, context, turn.max_tokens, due=due, wants_ids=len(turns) > 1)
            answers.append(answer)
            context += answer.token_ids
            due = time.perf_counter()

    async with asyncio.TaskGroup() as group:
        for turns in plan:
            group.create_task(converse(turns))
    return answers, time.perf_counter() - started


async def measure_unloaded(
    session: aiohttp.ClientSession, url: str, longest: int, vocabulary: int
) -> Unloaded:
    """Ask an idle node for prompts of 16 tokens, twice as many, and so on, one at a time."""
    chance = random.Random(0)
    lengths = [*itertools.takewhile(lambda length: length < longest, (16 << power for power in range(20)))]
    ttfts: dict[int, float] = {}
    gaps: list[float] = []
    for number in (16, *lengths, longest):  # the first one only warms up
        prompts = [chance.choices(range(FIRST_TOKEN, vocabulary), k=number) for _ in range(3)]
        answers = [await ask(session, url, each, 8, due=time.perf_counter()) for each in prompts]
        ttfts[number] = statistics.median(answer.ttft_s for answer in answers)
        gaps += [gap for answer in answers for gap in answer.gaps]
    return Unloaded(dict(sorted(ttfts.items())), statistics.median(gaps))


# -- the program -------------------------------------------------------------------------------------


def chosen_ways(options: argparse.Namespace) -> dict[str, Way]:
    """Return the ways that can be measured here. Say why others cannot."""
    found = {}
    for name in options.ways:
        way = WAYS[name]
        if way.connector == "nixl" and options.engine != "vllm":
            why = "only nodes of vLLM can have NixlConnector"
        elif way.connector == "nixl" and importlib.util.find_spec("nixl") is None:
            why = "nixl is not installed"
        else:
            found[name] = way
            continue
        print(f"{name} is not measured: {why}", flush=True)
    if not found:
        sys.exit("nothing to measure: name other --ways")
    return found


@dataclass
class Benchmark:
    """What every measurement needs.

    Attributes:
        fleets: The nodes of each connector.
        vocabulary: The number of the model's tokens.
        results: What is written in the end.
        logs: The folder of the routers' logs.
    """

    options: argparse.Namespace
    fleets: Mapping[str, Sequence[LaunchedProcess]]
    vocabulary: int
    results: dict[str, Any]
    logs: Path

    async def run(
        self, ways: Mapping[str, Way], plans: Mapping[str, Sequence[Sequence[Conversation]]]
    ) -> None:
        """Measure every load in every way, and add the rows to the results as each load is complete.

        Args:
            plans: The conversations of each round, by load.
        """
        timeout = aiohttp.ClientTimeout(REQUEST_TIMEOUT_S)
        connections = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connections, timeout=timeout) as session:
            longest = max(prompt for own in plans.values() for plan in own for prompt, _ in sizes(plan))
            nodes = awake(self.fleets, next(iter(self.fleets)))
            idle = await measure_unloaded(session, nodes[0].url, longest, self.vocabulary)
            self.results["unloaded"] = {"ttft_s": idle.ttfts, "itl_s": idle.itl_s}
            ttfts = ", ".join(f"{number}: {seconds * 1e3:,.0f}" for number, seconds in idle.ttfts.items())
            self.say(f"One idle node: ITL {idle.itl_s * 1e3:.1f} ms; TTFT in ms by prompt tokens: {ttfts}.")
            if self.options.costs is not None and not self.options.costs.exists():
                await self.measure_costs([node.url for node in nodes[:2]])
            for load, own in plans.items():
                rounds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
                paces = [paced(each, idle, NUM_NODES, self.options.intensity) for each in own]
                predicted = self.predict(ways, [plan for plan, _ in paces])
                for number, (plan, _) in enumerate(paces):
                    first = number % len(ways)
                    for name in [*ways][first:] + [*ways][:first]:
                        salt = f"{self.options.seed} {load} {number} {name}"
                        rounds[name].append(await self.measure(session, ways[name], plan, salt, idle))
                        print(f"measured {load}, round {number + 1}, {name}", file=sys.stderr, flush=True)
                rows = [row_of(load, name, told) for name, told in rounds.items()]
                self.results["rows"] += rows
                how = f"{sum(map(len, own[0]))} requests per round; {paces[-1][1]:.3g} s per unit of the load's time"
                self.say(f"### {load}\n\n{how}\n\n{table(rows, self.options.factor)}\n\n{standing(rows)}")
                if predicted:
                    self.say(comparison(predicted, rounds))

    async def measure_costs(self, urls: Sequence[str]) -> None:
        """Measure what `kvferry plan --measure` measures, and write it where it would."""
        before = Costs(chunk_tokens=self.options.chunk_tokens, max_requests=MAX_REQUESTS)

        def say(text: str) -> None:
            print(text, file=sys.stderr, flush=True)

        idle, _ = await measure(urls, before, say, NodeAccess())
        # Nodes on one machine share its memory bus. So each is measured again while another one does the
        # same.
        say("again, all nodes at once")
        both = [measure([url], idle, say, NodeAccess()) for url in urls]
        (costs, _), *_ = await asyncio.gather(*both)
        write_costs(costs, self.options.costs)

    def predict(
        self, ways: Mapping[str, Way], plans: Sequence[Sequence[Conversation]]
    ) -> dict[str, list[dict[str, float]]]:
        """Return the figures of all rounds that the costs of `--costs` predict, by way."""
        if self.options.costs is None:
            return {}
        costs = read_costs(self.options.costs)
        found = {name: [predict(name, plan, costs, NUM_NODES) for plan in plans] for name in ways}
        return {
            name: known
            for name, own in found.items()
            if (known := [each for each in own if each is not None])
        }

    async def measure(
        self,
        session: aiohttp.ClientSession,
        way: Way,
        plan: Sequence[Conversation],
        salt: str,
        idle: Unloaded,
    ) -> dict[str, float]:
        """Measure one round of one load in one way."""
        nodes = awake(self.fleets, way.connector)
        async with in_front(way, nodes, self.logs) as url:
            warm_up = [(Turn(0.0, ((f"warm-up {number}", 64),), 2),) for number in range(2 * len(nodes))]
            await drive(session, url, warm_up, salt, self.vocabulary)
            before = counters(await settled(session, nodes)) | core_times(nodes)
            answers, seconds = await drive(session, url, plan, salt, self.vocabulary)
            after = counters(await settled(session, nodes)) | core_times(nodes)
        added = {what: after[what] - before[what] for what in after}
        if added["failed_loads"]:
            self.say(f"Warning: {added['failed_loads']:g} loads failed; their prompts were computed again.")
        return figures_of(answers, seconds, added, idle, len(nodes), self.options.factor)

    def say(self, text: str) -> None:
        """Print a part of the results."""
        print(f"{text}\n", flush=True)


def awake(fleets: Mapping[str, Sequence[LaunchedProcess]], connector: str) -> Sequence[LaunchedProcess]:
    """Let one connector's nodes run, and stop all others, because some use the processor even when they are
    idle.
    """
    for name, nodes in fleets.items():
        for node in nodes:
            node.send_signal(signal.SIGCONT if name == connector else signal.SIGSTOP)
    return fleets.get(connector, ())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )

    def add(name: str, default: Any, text: str, **more: Any) -> None:
        more = more if "type" in more or "nargs" in more else {"type": type(default), **more}
        shown = " ".join(default) if isinstance(default, list) else default
        parser.add_argument(name, default=default, help=f"{text} (default: {shown or 'none'})", **more)

    add("--engine", "vllm", "engine of the nodes", choices=("vllm", "reference"))
    add("--model", "smollm2", "smollm2, or a model's folder")
    parser.add_argument("--tiny", action="store_true", help="use a small random model instead")
    add("--ways", ["least-load", "pair-1+1", "auto"], "ways", nargs="+", choices=WAYS, metavar="NAME")
    add("--loads", list(LOADS), "loads; none: only traces", nargs="*", choices=LOADS, metavar="NAME")
    add("--trace", [], "a trace to replay as a further load", type=Path, nargs="+", metavar="FILE")
    add("--scale", 32.0, "divide a trace's lengths by this number")
    add("--requests", 24, "requests per load and round")
    add("--rounds", 3, "rounds per way")
    add("--intensity", 0.7, "work that arrives per unit of time, 1 for what nodes do one by one")
    add("--size", 0.5, "multiply the lengths of loads other than traces by this number")
    add("--factor", 3.0, "multiple of an idle node's figures that is the limit in the first table")
    add("--chunk-tokens", 512, "most tokens that a node computes in one step")
    add(
        "--costs",
        None,
        "predict figures, before they are measured, from these costs; if there is no such file, measure and write it",
        type=Path,
        metavar="FILE",
    )
    add("--seed", 0, "seed of lengths, arrivals and tokens")
    add("--json", None, "write the rows there as JSON", type=Path, metavar="FILE")
    add("--logs", None, "keep the logs of nodes and routers there", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if not (options.loads or options.trace):
        parser.error("there is no load: give --loads or --trace")
    if len(os.sched_getaffinity(0)) < NUM_NODES:
        parser.error(f"{NUM_NODES} nodes need as many cores; this process has fewer")
    if min(options.requests, options.rounds, options.intensity, options.size, options.scale) <= 0:
        parser.error("--requests, --rounds, --intensity, --size and --scale must be greater than 0")
    return options


def run(options: argparse.Namespace, folder: Path, results: dict[str, Any]) -> None:
    """Start the nodes, and measure everything."""
    ways = chosen_ways(options)
    named = {name: LOADS[name] for name in options.loads}
    for path in options.trace:
        requests = read_trace_file(path, options.scale, options.requests)
        trace_name = f"{path.stem}, lengths / {options.scale:g}"

        def replay(
            chance: random.Random,
            number: int,
            size: float,
            requests: list[Conversation] = requests,
        ) -> list[Conversation]:
            return requests

        named[trace_name] = replay
    plans = {
        name: [
            load(random.Random(f"{options.seed} {name} {number}"), options.requests, options.size)
            for number in range(options.rounds)
        ]
        for name, load in named.items()
    }
    longest = max(sum(pair) for own in plans.values() for plan in own for pair in sizes(plan))
    if longest >= POOL_TOKENS:
        sys.exit(f"a request needs {longest} tokens: the nodes have {POOL_TOKENS}; give a greater --scale")
    if options.tiny:
        model = write_random_model(folder / "model", longest + 64)
    elif options.model == "smollm2":
        model = default_model_folder()
    else:
        model = Path(options.model)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    with Launcher(logs=folder) as launcher:
        fleets: dict[str, list[LaunchedProcess]] = {}
        for connector in dict.fromkeys(way.connector for way in ways.values()):
            awake(fleets, connector)
            fleets[connector] = start_nodes(launcher, options, model, longest, connector)
            print(f"{connector}: {NUM_NODES} nodes run", file=sys.stderr, flush=True)
        try:
            benchmark = Benchmark(options, fleets, vocabulary, results, folder)
            what = "a small random model" if options.tiny else options.model
            benchmark.say(
                f"{NUM_NODES} nodes ({options.engine}, {what}), one core each; {options.rounds} rounds; intensity "
                f"{options.intensity:g}; seed {options.seed}. Medians (least–greatest). Goodput: requests per second and "
                f"core whose TTFT and mean ITL are within this multiple of an idle node's."
            )
            asyncio.run(benchmark.run(ways, plans))
        except (BrokenAnswerError, ExceptionGroup) as error:
            for node in launcher.processes:
                error.add_note(f"the end of the log of {node.name}:\n{node.log_tail}")
            raise


def main() -> int:
    options = parse()
    results: dict[str, Any] = {"settings": {key: str(value) for key, value in vars(options).items()}}
    results |= {"cores": os.cpu_count(), "rows": []}
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    status = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            run(options, folder, results)
        except (BrokenAnswerError, LaunchError, ExceptionGroup) as error:
            failures = getattr(error, "exceptions", (error,))
            if not all(isinstance(each, BrokenAnswerError | LaunchError) for each in failures):
                raise
            print("\n".join([*getattr(error, "__notes__", ()), *map(str, failures)]), file=sys.stderr)
            status = 1
        except KeyboardInterrupt:
            print("interrupted; everything that was started has ended", file=sys.stderr)
            status = 128 + signal.SIGINT
        finally:
            if options.json is not None:  # the loads that are complete
                options.json.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nload average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return status


if __name__ == "__main__":
    sys.exit(main())
