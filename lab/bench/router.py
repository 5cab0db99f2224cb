"""Measure what a router costs: requests per second and streams of one process, and its CPU time for each,
beside vllm-router's.

    python -m kvferry.lab.bench.router [--seconds S] [--rounds N] [--streams N ...] [--json FILE]

The nodes are programs that answer at once and compute nothing, so what is measured is the routers. `pair`
sends each request to a prefill node and a decode node; `plain` spreads requests over two nodes that are
alike. `direct` is the same clients without a router. The router has a core of its own, and nodes and clients
have the others: where a router is cheaper than they are, its requests per second are theirs, and its CPU time
per request says what it could do. vllm-router takes part if it is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from aiohttp import web

from kvferry.lab.bench.vllm_router import find_vllm_router, start_router_program
from kvferry.lab.load import percentile
from kvferry.lab.machine import about
from kvferry.lab.servers import LaunchedProcess, Launcher

#: Connections that send one request after the other.
NUM_CLIENTS = 32
#: Seconds between two tokens of a stream: 20 tokens per second are those of a busy node.
TOKEN_S = 0.05
START_S = 30.0
PROMPT = list(range(1000, 1512))
KVFERRY, VLLM = "kvferry router", "vllm-router"

# -- nodes -----------------------------------------------------------------------------------------------

#: What a node of kvferry says so that both nodes may be asked at once.
PLACE = {
    "remote_engine_id": "e",
    "remote_epoch": "5",
    "remote_addresses": ["shm:x"],
    "tp_size": 1,
    "rendezvous_supported": True,
}
BUILD_INFO = 'kvferry_build_info{protocol="7",version="0"} 1.0\n'


async def complete(request: web.Request) -> web.StreamResponse:
    """Answer at once with one token, or with a stream that has a token each `TOKEN_S`."""
    body = await request.json()
    params = body.get("kv_transfer_params") or {}
    if not body.get("stream"):
        offer = {**PLACE, "do_remote_prefill": True, "remote_request_id": "r"} if params else None
        return web.json_response({**_piece(), "kv_transfer_params": offer})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    event = b"data: %s\n\n" % json.dumps(_piece()).encode()
    began = time.monotonic()
    for number in range(body["max_tokens"]):
        # By the clock, so that a late token does not delay the next ones.
        await asyncio.sleep(max(0.0, began + number * TOKEN_S - time.monotonic()))
        await response.write(event)
    await response.write(b"data: [DONE]\n\n")
    return response


def _piece() -> dict[str, object]:
    choice = {"index": 0, "text": " ferry", "token_ids": [7], "finish_reason": None}
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": 1, "total_tokens": len(PROMPT) + 1}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "model": "model",
        "choices": [choice],
        "usage": usage,
    }


def serve_nodes() -> None:
    """Serve two nodes in this process, and print their URLs."""

    async def ready(request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok", "kv_transfer_params": PLACE})

    async def metrics(request: web.Request) -> web.StreamResponse:
        return web.Response(text=BUILD_INFO)

    async def models(request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": "model", "object": "model"}]})

    async def health(request: web.Request) -> web.StreamResponse:
        return web.Response()

    async def main() -> None:
        urls = []
        for _ in range(2):
            app = web.Application()
            app.router.add_post("/v1/completions", complete)
            for path, handler in (("ready", ready), ("health", health), ("metrics", metrics)):
                app.router.add_get(f"/{path}", handler)
            app.router.add_get("/v1/models", models)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port, *_ = runner.addresses[0]
            urls.append(f"http://{host}:{port}")
        print(json.dumps(urls), flush=True)
        await asyncio.to_thread(sys.stdin.read)  # until the parent closes it

    asyncio.run(main())


@asynccontextmanager
async def nodes() -> AsyncIterator[list[str]]:
    """Run the nodes in a process of their own. Yields their URLs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvferry.lab.bench.router",
        "--serve-nodes",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(await process.stdout.readline())
    finally:
        process.stdin.close()
        await process.wait()


# -- clients ---------------------------------------------------------------------------------------------

# Clients of their own kind: with a library for HTTP they would cost more than what they measure.


def _request(url: str, max_tokens: int, *, stream: bool) -> bytes:
    body = json.dumps(
        {"model": "model", "prompt": PROMPT, "max_tokens": max_tokens, "stream": stream}
    ).encode()
    host = url.removeprefix("http://")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def _answer(reader: asyncio.StreamReader, on_piece: Callable[[bytes], None]) -> None:
    """Read one answer of status 200."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if not head.startswith(b"http/1.1 200"):
        raise RuntimeError(f"the answer has another status: {head.decode(errors='replace')}")
    if b"\r\ncontent-length:" in head:
        length = int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
        return on_piece(await reader.readexactly(length))
    while size := int(await reader.readuntil(b"\r\n"), 16):
        on_piece((await reader.readexactly(size + 2))[:-2])
    await reader.readexactly(2)


async def ask_again_and_again(url: str, seconds: float) -> list[float]:
    """Send requests of one token over `NUM_CLIENTS` connections, each after the last.

    Returns what each took, in seconds.
    """
    request, until = _request(url, 1, stream=False), time.monotonic() + seconds
    taken = list[float]()

    async def client() -> None:
        reader, writer = await _connect(url)
        while (began := time.monotonic()) < until:
            writer.write(request)
            await _answer(reader, lambda piece: None)
            taken.append(time.monotonic() - began)
        writer.close()

    await asyncio.gather(*(client() for _ in range(NUM_CLIENTS)))
    return taken


async def stream(url: str, num_streams: int, seconds: float) -> tuple[int, list[float]]:
    """Run `num_streams` streams at once.

    Returns how many tokens came, and the gaps between tokens per stream, in seconds.
    """
    num_tokens = int(seconds / TOKEN_S)
    request = _request(url, num_tokens, stream=True)
    total, gaps = 0, list[float]()

    async def client(number: int) -> None:
        await asyncio.sleep(TOKEN_S * number / num_streams)  # so that tokens do not all come at once
        reader, writer = await _connect(url)
        last = 0.0

        def note(piece: bytes) -> None:
            nonlocal total, last
            now = time.monotonic()
            total += piece.count(b'"choices"')
            if last:
                gaps.append(now - last)
            last = now

        writer.write(request)
        await _answer(reader, note)
        writer.close()

    await asyncio.gather(*(client(number) for number in range(num_streams)))
    return total, gaps


# -- what is measured ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """One way in front of the nodes, under one load, in one round.

    Attributes:
        load: `requests`, or the number of streams.
        rate: Requests, or tokens, per second.
        cpu_us: CPU time of the router per request or token, in microseconds.
        cores: CPU time of the router per second.
        p50_ms, p99_ms: Of the time of a request, or of the gap between two tokens.
    """

    way: str
    load: str
    rate: float
    cpu_us: float
    cores: float
    p50_ms: float
    p99_ms: float


def _cpu_s(router: LaunchedProcess | None) -> float:
    if router is None:
        return 0.0
    ticks = 0
    for pid in router.pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def measure(way: str, url: str, router: LaunchedProcess | None, load: int, seconds: float) -> Result:
    """Put one load on one way. A load is a number of streams; 0 stands for requests of one token."""
    await ask_again_and_again(url, 0.5)  # connections, caches and what the router learns about its nodes
    before, began = _cpu_s(router), time.monotonic()
    if load:
        num, times = await stream(url, load, seconds)
    else:
        times = await ask_again_and_again(url, seconds)
        num = len(times)
    wall_s, cpu_s = time.monotonic() - began, _cpu_s(router) - before
    p50_ms, p99_ms = (1e3 * percentile(times, share) for share in (0.5, 0.99))
    name = f"{load} streams" if load else "requests"
    return Result(way, name, num / wall_s, 1e6 * cpu_s / num, cpu_s / wall_s, p50_ms, p99_ms)


def start_all(launcher: Launcher, one: str, other: str) -> dict[str, LaunchedProcess]:
    """Start each router in front of the two nodes, once as a pair and once as two nodes that are alike."""
    log = ("--log-level", "warning")
    pair = ("--prefill", one, "--decode", other)
    both = [word for url in (one, other) for word in ("--prefill", url, "--decode", url)]
    routers = {
        f"pair: {KVFERRY}": launcher.start("pair", "router", "--port", "0", *log, *pair),
        f"plain: {KVFERRY}": launcher.start(
            "plain", "router", "--port", "0", *log, "--placement", "never", *both
        ),
    }
    if find_vllm_router() is not None:
        routers[f"pair: {VLLM}"] = start_router_program(launcher, VLLM, "--vllm-pd-disaggregation", *pair)
        routers[f"plain: {VLLM}"] = start_router_program(launcher, VLLM, "--worker-urls", one, other)
    return routers


async def run(args: argparse.Namespace) -> list[Result]:
    cores = sorted(os.sched_getaffinity(0))
    results: list[Result] = []
    if len(cores) > 1:
        os.sched_setaffinity(0, cores[1:])
    async with nodes() as (one, other):
        with Launcher() as launcher:
            routers = await asyncio.to_thread(start_all, launcher, one, other)
            await asyncio.to_thread(launcher.wait_ready, list(routers.values()), START_S)
            for router in routers.values():
                router.pin({cores[0]})
            ways = {"direct": (other, None)} | {name: (each.url, each) for name, each in routers.items()}
            for number in range(args.rounds):
                for load in (0, *args.streams):
                    for way, (url, process) in ways.items():
                        results.append(await measure(way, url, process, load, args.seconds))
                        print(f"round {number + 1}: {results[-1]}", file=sys.stderr)
    return results


def table(results: Sequence[Result]) -> Iterator[str]:
    """Medians over the rounds; of the CPU time also the least and the most."""
    yield "| load | way | per second | CPU per request or token | cores | p50 | p99 |"
    yield "|---|---|---|---|---|---|---|"
    for load, way in dict.fromkeys((each.load, each.way) for each in results):
        rounds = [each for each in results if (each.load, each.way) == (load, way)]

        def median(name: str, rounds: Sequence[Result] = rounds) -> float:
            return float(statistics.median(getattr(each, name) for each in rounds))

        costs = [each.cpu_us for each in rounds]
        cost = f"{median('cpu_us'):,.0f} µs ({min(costs):,.0f} to {max(costs):,.0f})" if max(costs) else "–"
        yield (
            f"| {load} | {way} | {median('rate'):,.0f} | {cost} | {median('cores'):.2f} "
            f"| {median('p50_ms'):.1f} ms | {median('p99_ms'):.1f} ms |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of each load (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of everything (default: %(default)s)")
    parser.add_argument(
        "--streams", type=int, nargs="+", default=[50, 200], help="streams at once (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write all results here, too")
    parser.add_argument("--serve-nodes", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve_nodes:
        return serve_nodes()
    results = asyncio.run(run(args))
    print("\n".join(table(results)))
    if args.json:
        found = {"machine": about(), "results": [asdict(each) for each in results]}
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
