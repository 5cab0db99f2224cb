"""Compare pairs of vLLM servers behind kvferry's router with a single server: kvferry on each transport, and
NixlConnector.

    .venv-vllm/bin/python -m kvferry.lab.bench.vllm_pair [--systems shm shm+rendezvous nixl ...]
        [--measure prompts load] [--link 1gbit|10gbit] [--rounds N] [--json FILE] [--smoke]

All servers are started once. In each round every system is measured, one after the other, in a new order. The
processes of the other systems are stopped meanwhile, because some use the processor even when they are idle.
Ratios are to a single server in the same round: a node of the first pair, asked without the router. For the
times to the first and second token it is the prefill node, otherwise the decode node. Every prompt is new, so
no prefix is cached. Tables are Markdown; each figure is a median over rounds with its quartiles.

prompts    Shapes of prompt tokens x concurrent requests: the times to the first token (TTFT) and to the
           second one, and the time between tokens (ITL), as means over the requests of a round. Bytes are
           those of the prompts' KV cache that the nodes report as moved; 1.00 x means each byte once. A load
           takes from its first read to the end of the last one. What is *exposed* is not hidden by computing
           the prompt: the time from the moment when the whole offer could be read, or when the load was
           ordered if that was later, until the load ended. Both are per request.
load       `vllm bench serve` with prompts and answers of mixed lengths, several requests at a time.

With --link, the two nodes of a pair are in network namespaces of their own, and the KV cache crosses a link
of that rate. HTTP uses other links without a limit. This needs root, iproute2, and a transport for networks.

The default model is random. It computes little but has as much KV cache per token as a large one, so that the
handoff shows. `--model smollm2` is the model of the examples. NixlConnector (`nixl`) takes part if `nixl` can
be imported (`pip install --no-deps nixl nixl-cu12`); it runs over UCX on main memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from kvferry.lab import client
from kvferry.lab.client import BrokenAnswerError, totals_of
from kvferry.lab.load import markdown, percentile
from kvferry.lab.servers import (
    KVFERRY,
    VLLM_SERVE,
    LaunchedProcess,
    Launcher,
    LaunchError,
    free_port,
    start_vllm,
)

BLOCK_SIZE = 32
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 8, 8, 64
VOCABULARY = 512
#: Lengths of a load's prompts and answers differ from their average by at most this part of it.
LOAD_RANGE = 0.5
#: Seconds between resuming a system and measuring it, for the work that its processes do first.
SETTLE_S = 0.3
START_TIMEOUT_S, SETTLE_TIMEOUT_S = 900.0, 60.0
#: The beginnings of what nodes count of requests and loads.
LOAD_METRICS = ("kvferry_load_", "kvferry_engine_prompt_tokens", "vllm:nixl_", "vllm:prompt_tokens_by_source")
#: The first pair's nodes without the router: the decode node, and the prefill node.
ONE_NODE, PREFILL_ALONE = "one node", "the prefill node alone"
#: Beside that of `start_vllm`.
ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1",  # for vLLM's own processes; in a namespace it would find no address
    # The engine computes in its own process, as on one GPU. By default vLLM for the CPU adds a process for
    # the model, and each of the two spins while it waits for the other: four busy threads per pair, on as
    # many cores as there are.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

#: Systems that are no transport of kvferry.
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
#: After a transport's name: the router asks both nodes at once.
RENDEZVOUS = "+rendezvous"
DEFAULT_SYSTEMS = ("shm", "shm+rendezvous", "tcp", "tcp+rendezvous", "nixl")


@dataclass(frozen=True)
class Shape:
    """Prompts of `num_tokens` tokens, `concurrency` at a time."""

    num_tokens: int
    concurrency: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        num_tokens, concurrency = text.split("x")
        return cls(int(num_tokens), int(concurrency))

    @property
    def num_bytes(self) -> int:
        """Bytes that one request of the random model hands over: whole blocks of keys and values, float32."""
        num_blocks = -(-self.num_tokens // BLOCK_SIZE)
        return num_blocks * BLOCK_SIZE * NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 4


@dataclass(frozen=True)
class Sample:
    """One round of one system.

    Attributes:
        ttft_s: Seconds to the first token, as the mean over requests.
        itl_s: The same for the mean time between two tokens.
        num_bytes: Bytes that all requests moved.
        second_s: Seconds to the second token, as the mean over requests.
        load_s: Seconds that the nodes loaded, as the sum over requests; 0 if the connector does not report
            them.
        exposed_s: Seconds of loads that computing the prompts did not hide, as the sum over requests.
    """

    ttft_s: float
    itl_s: float
    num_bytes: int
    second_s: float = 0.0
    load_s: float = 0.0
    exposed_s: float = 0.0


# -- processes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """One server or a pair of them that answers prompts.

    Attributes:
        url: Where clients send their requests.
        nodes: vLLM's servers.
        router: None if clients ask the only node.
    """

    name: str
    url: str
    nodes: tuple[LaunchedProcess, ...]
    router: LaunchedProcess | None

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Let its processes run inside the block, and stop them after it."""
        servers = [*self.nodes, *([] if self.router is None else [self.router])]
        for server in servers:
            server.thaw()
        await asyncio.sleep(SETTLE_S)
        # A health check that was under way when the router was stopped may have failed. It then takes one
        # request until the router knows again where the prefill node can be met.
        if self.router is not None:
            async with aiohttp.ClientSession() as session:
                deadline = time.monotonic() + 60.0
                while not await is_ready(session, self.router):
                    if time.monotonic() > deadline:
                        sys.exit(
                            f"{self.name} did not get ready again: its log ends with:\n{self.router.log_tail}"
                        )
                    await asyncio.sleep(0.1)
                await ask(session, self.url, random.choices(range(3, VOCABULARY), k=BLOCK_SIZE), 2)
        try:
            yield
        finally:
            for server in servers:
                server.freeze()


async def is_ready(session: aiohttp.ClientSession, router: LaunchedProcess) -> bool:
    async with session.get(f"{router.url}/ready", timeout=aiohttp.ClientTimeout(60.0)) as answer:
        return answer.status == 200


# -- links -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Host:
    """Where a node runs.

    Attributes:
        prefix: What runs a command there.
        http_host: The address of its HTTP server.
        link_host: The address of its end of the link; empty if there is none.
        environment: Variables for the node.
    """

    prefix: tuple[str, ...] = ()
    http_host: str = "127.0.0.1"
    link_host: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def hosts(rate: str) -> Iterator[tuple[Host, Host]]:
    """Yield where a prefill and a decode node run: on this host, or each in a namespace, with a link between
    them.

    Args:
        rate: The rate of the link, as `tc` reads it. Empty: no namespaces.
    """
    if not rate:
        yield Host(), Host()
        return

    def run(*command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(
                f"cannot make a link of {rate}: {' '.join(command)}: {done.stderr.strip()}; are you root?"
            )

    names = [f"kvferry-bench-{os.getpid()}-{end}" for end in "pd"]
    made = []
    with ExitStack() as resources:
        for number, name in enumerate(names):
            run("ip", "netns", "add", name)
            resources.callback(run, "ip", "netns", "del", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            # For HTTP: a pair of interfaces to this host, which ends with the namespace.
            here, subnet = f"kvb{os.getpid()}{'pd'[number]}", f"10.76.{number}"
            run("ip", "link", "add", here, "type", "veth", "peer", "name", "http", "netns", name)
            run("ip", "addr", "add", f"{subnet}.1/24", "dev", here)
            run("ip", "link", "set", here, "up")
            run("ip", "-n", name, "addr", "add", f"{subnet}.2/24", "dev", "http")
            run("ip", "-n", name, "link", "set", "http", "up")
            made.append(
                Host(
                    ("ip", "netns", "exec", name),
                    f"{subnet}.2",
                    f"10.77.0.{number + 1}",
                    # UCX would find that both are on one machine, and use shared memory.
                    {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "wire"},
                )
            )
        ends = [("name", "wire", "netns", name) for name in names]
        run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, host in zip(names, made, strict=True):
            run("ip", "-n", name, "addr", "add", f"{host.link_host}/24", "dev", "wire")
            run("ip", "-n", name, "link", "set", "wire", "up")
            # The burst is what arrives between two ticks of the clock, and more.
            limit = ("rate", rate, "burst", "4mb", "latency", "50ms")
            run("tc", "-n", name, "qdisc", "add", "dev", "wire", "root", "tbf", *limit)
        yield made[0], made[1]


# -- the systems -------------------------------------------------------------------------------------


def transfer_of(transport: str, host: Host) -> Mapping[str, Any]:
    """Return vLLM's KV transfer configuration."""
    if transport == "nixl":
        return NIXL
    options: dict[str, Any] = {"bind_host": host.link_host} if host.link_host else {}
    if options:
        # The link leads nowhere else. What TLS costs is measured by lab/bench/transports.py.
        options |= {"zeromq": {"curve": "off"}, "tcp": {"tls": "off"}}.get(transport, {})
        options["allow_plaintext"] = True
    return {**KVFERRY, "kv_connector_extra_config": {"transport": transport, "transport_options": options}}


def available(names: Sequence[str], rate: str) -> list[str]:
    """Return the systems that can be measured here. Say why others cannot.

    Args:
        rate: The rate of the link; empty if there is none.
    """
    found = []
    for name in names:
        transport = name.removesuffix(RENDEZVOUS)
        if transport == "nixl" and importlib.util.find_spec("nixl") is None:
            print(f"{name} is not measured: nixl is not installed", flush=True)
        elif rate and transport == "shm":
            print(f"{name} is not measured: shared memory does not cross a link", flush=True)
        else:
            found.append(name)
    if not found:
        sys.exit("nothing to measure: name other --systems")
    return found


def node_arguments(arguments: argparse.Namespace) -> list[str]:
    """Return arguments of one of vLLM's servers, with a pool a little larger than what is measured needs."""
    shapes = sizes(arguments)
    num_blocks = max(-(-(shape.num_tokens + 64) // BLOCK_SIZE) * shape.concurrency for shape in shapes)
    concurrency = max(shape.concurrency for shape in shapes)
    return [
        *("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK_SIZE)),
        *("--max-model-len", str(max(shape.num_tokens for shape in shapes) + 64)),
        *("--max-num-batched-tokens", str(arguments.chunk_tokens), "--max-num-seqs", str(concurrency)),
        *("--num-gpu-blocks-override", str(num_blocks + num_blocks // 4 + 2)),
        *(
            "--no-enable-prefix-caching",
            "--disable-uvicorn-access-log",
            "--distributed-executor-backend",
            "uni",
        ),
    ]


def sizes(arguments: argparse.Namespace) -> list[Shape]:
    """Return the shapes of everything that is measured, by which models and pools are sized."""
    found: list[Shape] = []
    if "prompts" in arguments.measure:
        found += arguments.shapes
    if "load" in arguments.measure:
        average = arguments.load_prompt_tokens + arguments.load_answer_tokens
        found += [Shape(int(average * (1 + LOAD_RANGE)), number) for number in arguments.concurrency]
    return found


def write_random_model(folder: Path, max_tokens: int) -> Path:
    """Write a random Llama model with a vocabulary of numbered words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_KV_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_tokens,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(
        models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(folder)
    return folder


def model_of(arguments: argparse.Namespace, folder: Path) -> Path:
    if arguments.model == "random":
        longest = max(shape.num_tokens for shape in sizes(arguments))
        return write_random_model(folder / "model", 2 * longest + 64)
    if arguments.model == "smollm2":
        from kvferry.lab.engine.default_model import default_model_folder

        return default_model_folder()
    return Path(arguments.model)


@contextmanager
def running(arguments: argparse.Namespace, folder: Path, model: Path) -> Iterator[list[System]]:
    """Start every system, two servers at a time.

    Systems that differ in the router's options share their nodes.
    """
    names = available(arguments.systems, arguments.link)
    systems: list[System] = []
    with hosts(arguments.link) as where, Launcher(logs=folder) as launcher:
        for transport in dict.fromkeys(name.removesuffix(RENDEZVOUS) for name in names):
            nodes = [
                start_vllm(
                    launcher,
                    f"{transport} {role}",
                    str(model),
                    node_arguments(arguments),
                    transfer_of(transport, host),
                    host=host.http_host,
                    command=(*host.prefix, *VLLM_SERVE),
                    environment={
                        **ENVIRONMENT,
                        **host.environment,
                        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                        "VLLM_NIXL_SIDE_CHANNEL_HOST": host.link_host or "127.0.0.1",
                    },
                )
                for role, host in zip(("prefill", "decode"), where, strict=True)
            ]
            launcher.wait_ready(nodes, START_TIMEOUT_S)
            for node in nodes:
                # NixlConnector binds all its engines to the same core.
                node.pin(range(os.cpu_count() or 1))
            print(f"{transport}: both nodes run", flush=True)
            if not systems:
                alone = zip((ONE_NODE, PREFILL_ALONE), reversed(nodes), strict=True)
                systems += [System(name, node.url, (node,), None) for name, node in alone]
            for name in names:
                if name.removesuffix(RENDEZVOUS) != transport:
                    continue
                urls = ("--prefill", nodes[0].url, "--decode", nodes[1].url)
                router = launcher.start(
                    f"{name} router",
                    *("router", "--port", "0", *urls, "--log-level", "warning"),
                    *("--rendezvous", "auto" if name.endswith(RENDEZVOUS) else "off"),
                )
                router.wait_ready(START_TIMEOUT_S)
                router.freeze()
                name = name if transport == "nixl" else f"kvferry {name}"
                systems.append(System(name, router.url, tuple(nodes), router))
            for node in nodes:
                node.freeze()
        yield systems


# -- asking ------------------------------------------------------------------------------------------


async def ask(
    session: aiohttp.ClientSession, url: str, prompt: Sequence[int], max_tokens: int
) -> list[float]:
    """Return when the first, the second and the last token of the answer arrived, in seconds since the
    request was sent.

    A server that is busy may send several tokens at once, so they are at the time of the same event.

    Raises:
        BrokenAnswerError: The request failed, or the answer has another number of tokens.
    """
    answer = await client.ask(session, url, prompt, max_tokens, model="model", ignore_eos=True)
    answer.require(max_tokens)
    arrived = [each - answer.sent for each in answer.times]
    return [arrived[0], arrived[min(1, len(arrived) - 1)], arrived[-1]]


async def settled(session: aiohttp.ClientSession, nodes: Sequence[LaunchedProcess]) -> dict[str, float]:
    """Return the totals of the nodes' metrics as soon as those of loads no longer change.

    A worker reports a load one step later.
    """
    deadline, before = time.monotonic() + SETTLE_TIMEOUT_S, None
    while True:
        page = ""
        for node in nodes:
            async with session.get(f"{node.url}/metrics") as answer:
                page += await answer.text()
        totals = totals_of(page)
        now = {name: total for name, total in totals.items() if name.startswith(LOAD_METRICS)}
        if now == before:
            return totals
        if time.monotonic() > deadline:
            raise BrokenAnswerError(f"the nodes did not come to rest within {SETTLE_TIMEOUT_S:g} s")
        before = now
        await asyncio.sleep(0.1)


async def measure_prompts(system: System, prompts: Sequence[Sequence[int]], max_tokens: int) -> Sample:
    """Ask a system for the answers to some prompts at once."""
    async with aiohttp.ClientSession() as session:
        before = await settled(session, system.nodes)
        try:
            times = await asyncio.gather(
                *(ask(session, system.url, prompt, max_tokens) for prompt in prompts)
            )
        except OSError as error:
            logs = [node.log_tail for node in system.nodes]
            sys.exit(f"{system.name}: a request failed: {error}\n" + "\n".join(logs))
        after = await settled(session, system.nodes)

    def grown(*names: str) -> float:
        return sum(after.get(name, 0.0) - before.get(name, 0.0) for name in names)

    if failures := grown("kvferry_load_failures_total"):
        sys.exit(f"{system.name}: {failures:g} loads failed:\n{system.nodes[-1].log_tail}")
    return Sample(
        ttft_s=statistics.mean(own[0] for own in times),
        itl_s=statistics.mean((own[-1] - own[0]) / (max_tokens - 1) for own in times),
        num_bytes=int(grown("kvferry_load_bytes_sum", "vllm:nixl_bytes_transferred_sum")),
        second_s=statistics.mean(own[1] for own in times),
        load_s=grown("kvferry_load_seconds_sum"),
        exposed_s=grown("kvferry_load_exposed_seconds_sum"),
    )


# -- prompts -----------------------------------------------------------------------------------------


async def prompts_table(arguments: argparse.Namespace, systems: Sequence[System]) -> list[dict[str, Any]]:
    chance = random.Random()
    rows: list[dict[str, Any]] = []
    for shape in arguments.shapes:
        samples: dict[str, list[Sample]] = {system.name: [] for system in systems}
        for number in range(arguments.rounds + 1):
            for system in chance.sample(systems, len(systems)):
                # Round 0, of one prompt, only warms up.
                prompts = [
                    chance.choices(range(3, VOCABULARY), k=shape.num_tokens)
                    for _ in range(shape.concurrency if number else 1)
                ]
                async with system.awake():
                    sample = await measure_prompts(system, prompts, arguments.max_tokens)
                if number:
                    samples[system.name].append(sample)
        # What the prefill node computes takes as long as at that node: two processes of one program differ by
        # up to 5 %.
        prefills = zip(samples[ONE_NODE], samples.pop(PREFILL_ALONE), strict=True)
        samples[ONE_NODE] = [
            replace(own, ttft_s=prefill.ttft_s, second_s=prefill.second_s) for own, prefill in prefills
        ]
        rows += _rows(shape, samples, has_known_size=arguments.model == "random")
        print(f"measured {shape.num_tokens} x {shape.concurrency}", file=sys.stderr, flush=True)
    print(f"\n{_table(rows)}", flush=True)
    return rows


def _rows(
    shape: Shape, samples: Mapping[str, Sequence[Sample]], *, has_known_size: bool = True
) -> list[dict[str, Any]]:
    """Return one row per system. A figure with a spread is `[median, first quartile, third quartile]`."""
    alone = samples[ONE_NODE]
    return [
        {
            **asdict(shape),
            "system": name,
            "rounds": len(own),
            "ttft_ms": spread([sample.ttft_s * 1e3 for sample in own]),
            "ttft_ratio": _ratio(own, alone, lambda sample: sample.ttft_s),
            "second_ms": spread([sample.second_s * 1e3 for sample in own]),
            "second_ratio": _ratio(own, alone, lambda sample: sample.second_s),
            "itl_ms": spread([sample.itl_s * 1e3 for sample in own]),
            "itl_ratio": _ratio(own, alone, lambda sample: sample.itl_s),
            "num_bytes": statistics.median(sample.num_bytes for sample in own),
            "bytes_ratio": statistics.median(sample.num_bytes for sample in own)
            / (shape.num_bytes * shape.concurrency)
            if has_known_size
            else None,
            "load_ms": statistics.median(sample.load_s * 1e3 for sample in own) / shape.concurrency,
            "exposed_ms": statistics.median(sample.exposed_s * 1e3 for sample in own) / shape.concurrency,
            "exposed": statistics.median(sample.exposed_s / sample.load_s for sample in own)
            if all(sample.load_s for sample in own)
            else None,
        }
        for name, own in samples.items()
    ]


def spread(figures: Sequence[float]) -> list[float]:
    """Return the median and both quartiles."""
    return [percentile(figures, share) for share in (0.5, 0.25, 0.75)]


def _ratio(
    own: Sequence[Sample], other: Sequence[Sample], figure: Callable[[Sample], float]
) -> list[float] | None:
    """Return the spread of the ratios to another system's figure in the same round."""
    if not all(figure(sample) for sample in other):
        return None
    return spread([figure(a) / figure(b) for a, b in zip(own, other, strict=True)])


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table."""
    titles = (
        *("prompt tokens × at a time", "", "TTFT ms", "ratio", "second token ms", "ratio", "ITL ms", "ratio"),
        *("MB", "load ms", "exposed ms"),
    )
    lines: list[Sequence[str]] = []
    shape = None
    for row in rows:
        own = f"{row['num_tokens']:,} × {row['concurrency']}"
        size = f"{row['num_bytes'] / 1e6:.1f}" + (
            "" if not row["bytes_ratio"] else f" ({row['bytes_ratio']:.2f} ×)"
        )
        lines.append(
            (
                *("" if own == shape else own, row["system"]),
                *(_spread(row["ttft_ms"], 1), _spread(row["ttft_ratio"], 2)),
                *(_spread(row["second_ms"], 1), _spread(row["second_ratio"], 2)),
                *(_spread(row["itl_ms"], 1), _spread(row["itl_ratio"], 2)),
                size if row["num_bytes"] else "",
                f"{row['load_ms']:.1f}" if row["load_ms"] else "",
                "" if row["exposed"] is None else f"{row['exposed_ms']:.1f} ({row['exposed']:.0%})",
            )
        )
        shape = own
    return markdown(titles, lines)


def _spread(figures: Sequence[float] | None, digits: int) -> str:
    """Write a median with its quartiles."""
    if figures is None:
        return ""
    median, first, third = (f"{figure:,.{digits}f}" for figure in figures)
    return f"{median} ({first}–{third})"


# -- load --------------------------------------------------------------------------------------------

PERCENTILES = [f"p{percentile}_{figure}_ms" for figure in ("ttft", "itl") for percentile in (50, 95, 99)]


async def load_table(
    arguments: argparse.Namespace, systems: Sequence[System], model: Path, folder: Path
) -> list[dict[str, Any]]:
    chance = random.Random()
    rows: list[dict[str, Any]] = []
    with (folder / "bench.log").open("w") as log:
        for concurrency in arguments.concurrency:
            results: dict[str, list[dict[str, Any]]] = {system.name: [] for system in systems}
            for number in range(arguments.load_rounds):
                for system in chance.sample(systems, len(systems)):
                    async with system.awake():
                        with contextlib.redirect_stdout(log):
                            result = await _bench(arguments, system, model, concurrency, seed=number)
                    results[system.name].append(result)
            rows += _load_rows(concurrency, results)
            print(f"measured a load of {concurrency} requests at a time", file=sys.stderr, flush=True)
    print(f"\n{_load_table(rows)}", flush=True)
    return rows


async def _bench(
    arguments: argparse.Namespace, system: System, model: Path, concurrency: int, seed: int
) -> dict[str, Any]:
    """Run `vllm bench serve` in this process, because its start takes longer than a short measurement."""
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    options = [
        *("--backend", "openai", "--base-url", system.url, "--endpoint", "/v1/completions"),
        *("--model", "model", "--tokenizer", str(model), "--dataset-name", "random"),
        *("--random-input-len", str(arguments.load_prompt_tokens)),
        *("--random-output-len", str(arguments.load_answer_tokens)),
        *("--random-range-ratio", str(LOAD_RANGE), "--seed", str(seed)),
        *("--num-prompts", str(arguments.load_requests), "--max-concurrency", str(concurrency)),
        *("--num-warmups", "1", "--ignore-eos", "--temperature", "0", "--disable-tqdm"),
        *("--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,95,99"),
    ]
    result: dict[str, Any] = await serve.main_async(parser.parse_args(options))
    return result


def _load_rows(concurrency: int, results: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return one row per system, from the results of `vllm bench serve` in each round."""
    rows = []
    for name, own in results.items():
        row: dict[str, Any] = {"concurrency": concurrency, "system": name, "rounds": len(own)}
        for key in PERCENTILES:
            row[key] = spread([result[key] for result in own])
            pairs = zip(own, results[ONE_NODE], strict=True)
            row[f"{key}_ratio"] = statistics.median(mine[key] / alone[key] for mine, alone in pairs)
        row["requests_per_s"] = statistics.median(result["request_throughput"] for result in own)
        row["completed"] = sum(result["completed"] for result in own)
        row["failed"] = sum(result["failed"] for result in own)
        rows.append(row)
    return rows


def _load_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table. A figure is followed by its quartiles and its ratio to the single node."""
    figures = [f"{figure} {name} ms" for figure in ("TTFT", "ITL") for name in ("p50", "p95", "p99")]
    titles = ("at a time", "", *figures, "requests/s", "failed")
    lines: list[Sequence[str]] = []
    for row in rows:
        cells = [f"{_spread(row[key], 1)} {row[f'{key}_ratio']:.2f} ×" for key in PERCENTILES]
        failed = f"{row['failed']} of {row['completed'] + row['failed']}"
        lines.append((str(row["concurrency"]), row["system"], *cells, f"{row['requests_per_s']:.2f}", failed))
    return markdown(titles, lines)


# -- the program -------------------------------------------------------------------------------------


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run what was asked for. Returns the rows of each table."""
    model = model_of(arguments, folder)
    rows: dict[str, Any] = {}
    with running(arguments, folder, model) as systems:
        if "prompts" in arguments.measure:
            rows["prompts"] = asyncio.run(prompts_table(arguments, systems))
        if "load" in arguments.measure:
            others = [system for system in systems if system.name != PREFILL_ALONE]
            rows["load"] = asyncio.run(load_table(arguments, others, model, folder))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    shapes = ["128x1", "128x8", "1024x1", "1024x8", "4096x1", "4096x8", "8192x1"]
    parser.add_argument(
        "--systems",
        nargs="+",
        default=list(DEFAULT_SYSTEMS),
        metavar="NAME",
        help=f"a transport of kvferry, perhaps with {RENDEZVOUS}; or nixl (default: {' '.join(DEFAULT_SYSTEMS)})",
    )
    parser.add_argument(
        "--measure",
        nargs="+",
        choices=("prompts", "load"),
        default=["prompts"],
        help="what to measure (default: prompts)",
    )
    parser.add_argument(
        "--link",
        default="",
        metavar="RATE",
        help="rate of a link between the nodes, e.g. 10gbit (default: none)",
    )
    parser.add_argument(
        "--model", default="random", help="random, smollm2, or a model's folder (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds per shape (default: %(default)s)")
    parser.add_argument(
        "--chunk-tokens",
        type=int,
        default=1024,
        help="most tokens that a node computes in one step (default: %(default)s)",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=Shape.parse,
        default=[Shape.parse(text) for text in shapes],
        metavar="TOKENSxREQUESTS",
        help=f"prompt tokens x concurrent requests (default: {' '.join(shapes)})",
    )
    parser.add_argument("--max-tokens", type=int, default=8, help="tokens per answer (default: %(default)s)")
    parser.add_argument(
        "--concurrency", nargs="+", type=int, default=[1, 4, 8], help="requests at a time (default: 1 4 8)"
    )
    parser.set_defaults(load_rounds=3, load_requests=100, load_prompt_tokens=300, load_answer_tokens=32)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as JSON")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the servers' logs there")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="measure small shapes and loads once, to see that everything works; the figures mean nothing",
    )
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.shapes = [Shape(128, 1), Shape(256, 2)]
        arguments.rounds, arguments.max_tokens, arguments.chunk_tokens = 1, 4, 64
        arguments.concurrency, arguments.load_rounds, arguments.load_requests = [2], 1, 4
        arguments.load_prompt_tokens, arguments.load_answer_tokens = 100, 6
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            rows = measure(arguments, folder)
        except LaunchError as error:
            sys.exit(str(error))
    print(f"\nload average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
