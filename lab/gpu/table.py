"""The steps: what is tried of vLLM with kvferry, in this order."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import count, pairwise
from threading import Timer
from typing import Any, Final

from ..client import Answer, call, complete
from ..demo.load import PLAIN
from ..demo.report import Way
from ..load import line, percentile
from .report import SkippedError, Step
from .servers import Compared, PairKind, Servers, WrongAnswerError, itl_s

Lines = Iterator[str]
IN_TURN: Final = Way.IN_TURN.router_arguments
TITLES: Final = (
    *("prompt", "answers", "loaded", "mechanism", "read", "not hidden", "GB/s"),
    *("TTFT", "of the plain server", "ITL", "of the plain server"),
)
#: The same as `vllm bench serve`, which looks for a distribution called vllm.
BENCH: Final = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def titles(*names: str) -> Lines:
    """Yield the first lines of a table."""
    yield line(*names)
    yield line(*("---",) * len(names))


def ms(seconds: Sequence[float]) -> str:
    return f"{percentile(seconds, 0.5) * 1e3:.1f} ms"


def row_of(num_tokens: int, found: Sequence[Compared]) -> str:
    """Return a row of `TITLES`: medians over answers that are right."""
    ties = sum(each.near_ties for each in found)
    loads = [each.ours.transfer for each in found if each.ours.transfer]
    speed = [load["num_bytes"] / load["seconds"] / 1e9 for load in loads if load["seconds"]]
    return line(
        f"{num_tokens:,}",
        f"{len(found)} equal" + (f" apart from {ties} near-ties" if ties else ""),
        f"{sum(each.num_loaded for each in found) / len(found):,.0f} tokens",
        ", ".join(sorted({load["mechanism"] for load in loads})),
        ms([load["seconds"] for load in loads]) if loads else "",
        ms([load["exposed_seconds"] for load in loads]) if loads else "",
        f"{percentile(speed, 0.5):.1f}" if speed else "",
        ms([each.ours.ttft_s for each in found]),
        ms([each.alone.ttft_s for each in found]),
        ms([itl_s(each.ours) for each in found]),
        ms([itl_s(each.alone) for each in found]),
    )


def rows(servers: Servers, kind: PairKind, *router: str, lengths: Sequence[int] = ()) -> Lines:
    """Yield a table of a pair's answers beside the plain server's, one row per length of prompts.

    Raises:
        WrongAnswerError: an answer is wrong or was not loaded.
    """
    servers.plain(kind.model)  # first, so that the two do not start together
    pair = servers.pair(kind)
    url = pair.router(*router).url
    yield from titles(*TITLES)
    # The first request of each server compiles kernels.
    servers.compared(url, pair.decode, servers.prompt(100), kind.model)
    for num_tokens in lengths or servers.scale.lengths:
        prompts = [servers.prompt(num_tokens) for _ in range(servers.scale.rounds)]
        yield row_of(
            num_tokens, [servers.compared(url, pair.decode, prompt, kind.model) for prompt in prompts]
        )


def grown(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)


def need(condition: bool, why: str) -> None:
    if not condition:
        raise SkippedError(why)


def need_package(*names: str) -> None:
    """Skip the step unless one of these packages is installed."""
    need(any(find_spec(name) is not None for name in names), f"{names[0]} is not installed")


def check(condition: bool, what: str) -> None:
    if not condition:
        raise WrongAnswerError(what)


# -- the steps ---------------------------------------------------------------------------------------


def single(servers: Servers) -> Lines:
    """Ask the plain server alone, and see that another prompt has other log probabilities.

    If they were equal, no comparison of the later steps would notice a wrong cache.
    """
    began = time.monotonic()
    url = servers.plain().url
    yield f"The server was ready after {time.monotonic() - began:.0f} s."
    yield ""
    yield from titles("prompt", "TTFT", "ITL", "least difference of a log probability from another prompt's")
    for num_tokens in servers.scale.lengths:
        prompts = [servers.prompt(num_tokens) for _ in range(1 + servers.scale.rounds)]
        answers = [servers.ask(url, [prompt])[0] for prompt in prompts]
        unlike = [furthest(one, other) for one, other in pairwise(answers)]
        check(
            min(unlike) > servers.tolerance,
            f"log probabilities of two prompts of {num_tokens} tokens differ by at most {min(unlike):.3f}, "
            f"and {servers.tolerance} is allowed between two servers: this model shows no wrong cache",
        )
        yield line(
            f"{num_tokens:,}",
            ms([each.ttft_s for each in answers[1:]]),
            ms([itl_s(each) for each in answers[1:]]),
            f"{min(unlike):.2f}",
        )


def furthest(one: Answer, other: Answer) -> float:
    """Return the largest difference between the log probabilities of two answers."""
    return max(abs(ours - theirs) for ours, theirs in zip(one.logprobs, other.logprobs, strict=True))


def pairs(transport: str, servers: Servers) -> Lines:
    """Compare pairs over a transport, in both of vLLM's layouts."""
    if transport == "nixl":
        need_package("nixl_cu12", "nixl_cu13", "nixl")
    yield "A row of memory per layer:"
    yield ""
    yield from rows(servers, PairKind(transport), *IN_TURN)
    yield ""
    if servers.device == "cpu":
        yield "CPU attention has no layout with a block of all layers in one run of bytes."
        return
    yield "A block of all layers in one run of bytes:"
    yield ""
    yield from rows(servers, PairKind(transport, cross_layer=True), *IN_TURN)


def rendezvous(servers: Servers) -> Lines:
    """Ask both servers at once: the cache crosses while a prompt of several chunks is computed."""
    yield from rows(servers, PairKind("shm"))


def preemption(servers: Servers) -> Lines:
    """Ask a decode server for more than its pool has room for, while it loads."""
    length, answer_tokens, at_once = 512, 256, 8
    # Room for four prompts, but not for four prompts with their answers.
    room = 4 * length + 2 * answer_tokens
    pool = ("--num-gpu-blocks-override", str(room // servers.scale.block_size))
    plain = servers.plain().url
    pair = servers.pair(PairKind("shm", arguments=(*pool, "--max-model-len", "1024")))
    prompts = [servers.prompt(length) for _ in range(at_once)]
    before = servers.metrics(pair.decode)
    answers = servers.ask(pair.router(*IN_TURN).url, prompts, answer_tokens)
    after = servers.metrics(pair.decode)
    ties = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        alone = servers.ask(plain, [prompt], answer_tokens)[0]
        ties += servers.near_ties(prompt, answer, alone)
    names = ("vllm:num_preemptions_total", "kvferry_load_seconds_count", "kvferry_load_failures_total")
    preempted, loads, failures = (grown(before, after, name) for name in names)
    yield (
        f"{at_once} requests at once in a pool of {room:,} tokens: {preempted:.0f} preemptions, {loads:.0f} loads, "
        f"{failures:.0f} failed loads; all answers are equal apart from {ties} near-ties."
    )
    check(preempted > 0, "the decode server preempted no request, so nothing was shown")
    check(loads >= at_once, f"only {loads:.0f} of {at_once} requests were loaded")


def prefix_caches(servers: Servers) -> Lines:
    """Ask for prompts whose beginning one of the servers, or both, have in their prefix caches."""
    pair = servers.pair(PairKind("shm"))
    url = pair.router(*IN_TURN).url
    yield from titles("known beginning", "answer", "prompt", "loaded")
    for name, knowing in (
        ("of neither", ()),
        ("of the prefill server", (pair.prefill,)),
        ("of the decode server", (pair.decode,)),
        ("of both", (pair.prefill, pair.decode)),
    ):
        begun, rest = servers.prompt(512), servers.prompt(500)
        for server in knowing:
            servers.ask(server.url, [begun], 1)
        found = servers.compared(url, pair.decode, begun + rest)
        yield line(name, "equal", f"{len(begun + rest):,}", f"{found.num_loaded:,} tokens")
        fewer = pair.decode in knowing
        check(
            (found.num_loaded <= len(rest)) is fewer,
            f"{found.num_loaded} tokens of {len(begun + rest)} were loaded with a beginning {name}",
        )


def kill_prefill(servers: Servers) -> Lines:
    """Kill the prefill server while its cache is read. The answer must come, and be right."""
    num_tokens = servers.scale.lengths[-1]
    for share in (0.2, 0.5):
        pair = servers.pair(PairKind("tcp", policy="recompute"))
        url = pair.router(*IN_TURN).url
        # The first one's read is slower, because it makes the connection.
        *_, undisturbed = (servers.compared(url, pair.decode, servers.prompt(num_tokens)) for _ in range(2))
        read_s = float(undisturbed.ours.transfer["seconds"])
        prompt = servers.prompt(num_tokens)
        (alone,) = servers.ask(servers.plain().url, [prompt])
        offer = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        params = complete(pair.prefill.port, prompt, **offer)["kv_transfer_params"]
        before = servers.metrics(pair.decode)
        killing = Timer(read_s * share, pair.prefill.kill)
        killing.start()
        (answer,) = servers.ask(pair.decode.url, [prompt], kv_transfer_params=params)
        killing.join()
        failures = grown(before, servers.metrics(pair.decode), "kvferry_load_failures_total")
        servers.near_ties(prompt, answer, alone)
        servers.ask(pair.decode.url, [servers.prompt(num_tokens)])  # it still answers
        servers.end_pair()
        what = (
            "the load failed, and the decode server computed the prompt" if failures else "the load had ended"
        )
        yield (
            f"* killed {ms([read_s * share])} after the request, of a read of {ms([read_s])}: {what}; "
            f"the answer is the plain server's, its first token came after {ms([answer.ttft_s])}"
        )


def model(name: str, servers: Servers) -> Lines:
    """Compare a pair with another kind of model."""
    # Even one server's answers differ then. tests/vllm/test_models.py has a pair on CPUs, of another shape.
    is_exact = name != "mla" or servers.device == "cuda"
    need(is_exact, "vLLM's two kernels for latents on CPUs differ by more than a near-tie")
    lengths = [length for length in servers.scale.lengths if length < 10_000]
    yield from rows(servers, PairKind("shm", model=name), *IN_TURN, lengths=lengths)


def nixl_connector(servers: Servers) -> Lines:
    """Compare NixlConnector in the place of kvferry's connector."""
    need_package("nixl")  # what vLLM imports; it brings one of the others
    yield from rows(servers, PairKind(""), *IN_TURN)


def sleep(servers: Servers) -> Lines:
    """Let both servers sleep and wake, and hand over again."""
    need(servers.device == "cuda", "vLLM's CPU build cannot sleep")
    need(version_of_vllm() >= (0, 33), "vLLM before 0.33 tells no connector that its memory goes")
    # With the allocator of sleep mode the memory cannot be mapped by others, so it is staged.
    pair = servers.pair(PairKind("tcp", arguments=("--enable-sleep-mode",)))
    url = pair.router(*IN_TURN).url
    servers.compared(url, pair.decode, servers.prompt(1000))
    calls: list[tuple[str, object]] = [
        ("/wake_up?tags=weights", None),
        ("/collective_rpc", {"method": "reload_weights"}),
        ("/wake_up?tags=kv_cache", None),
    ]
    for level in (1, 2):  # 2 discards the weights
        for server in (pair.prefill, pair.decode):
            for path, body in [(f"/sleep?level={level}", None), *calls]:
                call("POST", server.url, path, body)
        found = servers.compared(url, pair.decode, servers.prompt(1000))
        yield f"* after a sleep of level {level}: equal, {found.num_loaded:,} tokens loaded"


def bench_serve(servers: Servers) -> Lines:
    """Run `vllm bench serve` at two rates on two servers, as plain nodes and as a pair."""
    pair = servers.pair(PairKind("shm"))
    urls = [
        word
        for node in zip(PLAIN.nodes, (pair.prefill, pair.decode), strict=True)
        for word in (node[0], node[1].url)
    ]
    plain = pair.launcher.start("router-plain", "router", "--port", "0", *urls, *PLAIN.arguments).wait_ready(
        60.0
    )
    yield from titles(
        "requests/s",
        "way",
        "completed",
        *(f"{name} {share}" for name in ("TTFT", "ITL") for share in ("p50", "p99")),
    )
    seeds = count()  # the same prompts would be cached from the other way
    for rate in servers.scale.rates:
        for name, router in ((PLAIN.name, plain), ("a pair", pair.router())):
            found = bench(servers, router.url, rate, next(seeds))
            check(found["failed"] == 0, f"{found['failed']} requests failed: {found.get('errors')}")
            times = [found[f"p{share}_{figure}_ms"] for figure in ("ttft", "itl") for share in (50, 99)]
            yield line(f"{rate:g}", name, str(found["completed"]), *(f"{value:.1f} ms" for value in times))


def bench(servers: Servers, url: str, rate: float, seed: int) -> dict[str, Any]:
    """Return the results of `vllm bench serve`."""
    num_requests, prompt_tokens, answer_tokens = servers.scale.load
    options = [
        *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", "model"),
        *("--tokenizer", str(servers.model("llama")), "--dataset-name", "random"),
        *("--random-input-len", str(prompt_tokens), "--random-output-len", str(answer_tokens)),
        *("--random-range-ratio", "0.5", "--seed", str(seed), "--num-warmups", "2"),
        *("--num-prompts", str(num_requests), "--request-rate", str(rate)),
        *("--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,99", "--ignore-eos"),
        *("--temperature", "0", "--disable-tqdm", "--save-result"),
        *("--result-dir", str(servers.folder), "--result-filename", "bench.json"),
    ]
    with (servers.folder / "bench.log").open("w") as log:
        subprocess.run([sys.executable, "-c", BENCH, *options], stdout=log, stderr=log, check=True)
    found: dict[str, Any] = json.loads((servers.folder / "bench.json").read_text())
    return found


def prove(servers: Servers) -> Lines:
    """Run `kvferry prove --short`."""
    servers.close()
    command = [sys.executable, "-m", "kvferry", "prove", "--short", "--out", str(servers.folder / "prove")]
    if servers.device == "cuda":
        # The kit's pool has 96 blocks, and must hold its longest prompt of 2,048 tokens.
        sizes = "--enforce-eager --block-size 32 --gpu-memory-utilization 0.2"
        command += [
            "--model",
            str(servers.model("llama")),
            "--dtype",
            servers.scale.dtype,
            "--serve-args",
            sizes,
        ]
    with (servers.folder / "prove.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            status = process.wait()
        finally:
            # Not SIGKILL: it must end its servers, whose engines would go on and keep the GPU's memory.
            process.terminate()
            process.wait()
    table = servers.folder / "prove" / "table.md"
    yield table.read_text() if table.exists() else ""
    check(status == 0, f"kvferry prove ended with status {status}: see {log.name}")


def two_gpus(servers: Servers) -> Lines:
    """Compare a pair with a GPU for each server."""
    need_gpus(servers, 2)
    yield from rows(servers, PairKind("shm", gpus=("0", "1")), *IN_TURN)


def two_ranks(servers: Servers) -> Lines:
    """Let a prefill server of two ranks hand over to a decode server of one."""
    need_gpus(servers, 2)
    ranks = ("--tensor-parallel-size", "2")
    yield from rows(servers, PairKind("auto", prefill_arguments=ranks, gpus=("0,1", "1")), *IN_TURN)


def need_gpus(servers: Servers, number: int) -> None:
    import torch

    there = torch.cuda.device_count() if servers.device == "cuda" else 0
    need(there >= number, f"needs {number} GPUs, and {there} are here")


def version_of_vllm() -> tuple[int, ...]:
    import vllm

    return tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])


def _step(name: str, limit_s: float, run: Callable[[Servers], Lines], about: str = "") -> Step:
    return Step(name, limit_s, about or (run.__doc__ or "").partition("\n")[0], run)


STEPS: Final = (
    _step("single", 200, single),
    _step("pair-shm", 240, partial(pairs, "shm"), "Compare pairs over shm, in both of vLLM's layouts"),
    _step("pair-tcp", 240, partial(pairs, "tcp"), "The same over tcp, staged"),
    _step("pair-nixl", 240, partial(pairs, "nixl"), "The same over nixl"),
    _step("rendezvous", 150, rendezvous),
    _step("preemption", 150, preemption),
    _step("prefix-caches", 120, prefix_caches),
    _step("kill-prefill", 200, kill_prefill),
    _step("mla", 180, partial(model, "mla"), "Compare a pair with latent attention"),
    _step("windows", 180, partial(model, "windows"), "Compare a pair with sliding windows"),
    _step("hybrid", 180, partial(model, "hybrid"), "Compare a pair with attention and recurrent states"),
    _step("nixl-connector", 150, nixl_connector),
    _step("sleep", 150, sleep),
    _step("bench-serve", 300, bench_serve),
    _step("prove", 720, prove),
    _step("two-gpus", 200, two_gpus),
    _step("two-ranks", 200, two_ranks),
)
