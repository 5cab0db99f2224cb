"""Compare a pair of vLLM nodes with a single one, for kvferry on each transport and for vLLM's NixlConnector.

    .venv-vllm/bin/python benchmarks/vllm_pair.py [--shapes 128x1 128x8 1024x1 ...] [--rounds N] [--json FILE]

All engines are started once. In each round every system answers the same number of prompts, one system after the other, in
a new order. The other systems are stopped meanwhile, because some use the processor even when they are idle. A shape is
prompt tokens x concurrent requests. The figures to look at are the medians of the ratios to the single node in the same
round: of the time to the first token (TTFT) and of the time between tokens (ITL). Bytes are those that the decode node
reports as received; ratio 1.00 means each byte of the prompts' cache once. Every prompt is new, so no prefix is cached.

The model is random. It computes little but has as much KV cache per token as a large one, so that the handoff shows.
NixlConnector takes part if `nixl` can be imported (`pip install --no-deps nixl nixl-cu12`); it runs over UCX on main memory.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).resolve().parents[1] / "tests" / "support" / "vllm_program.py"
BLOCK_SIZE = 32
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 8, 8, 64
VOCABULARY = 512
OFFER = {"do_remote_decode": True, "do_remote_prefill": False}
#: Seconds between resuming an engine and measuring it, for the work that it does first.
SETTLE_S = 0.3
NIXL_PORTS = count(24600)
KVFERRY_BYTES, NIXL_BYTES = "kvferry_load_bytes_sum", "vllm:nixl_bytes_transferred_sum"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # with more, threads that spin for each other on shared cores would measure the scheduler
}


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
        """Bytes that one request hands over: whole blocks of keys and values, float32."""
        num_blocks = -(-self.num_tokens // BLOCK_SIZE)
        return num_blocks * BLOCK_SIZE * NUM_LAYERS * 2 * NUM_KV_HEADS * HEAD_DIM * 4


@dataclass(frozen=True)
class Sample:
    """One round: seconds to the first token and between later ones, as means over requests; and the bytes of all requests."""

    ttft_s: float
    itl_s: float
    num_bytes: int


class Engine:
    """An engine in its own process."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        answers: asyncio.StreamReader,
        orders: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._answers = answers
        self._orders = orders
        self._waiting: dict[tuple[str, str | int], asyncio.Future[tuple[float, dict[str, Any]]]] = {}
        self._reader = asyncio.create_task(self._read())
        self._last_order = 0

    @classmethod
    async def start(cls, settings: Mapping[str, Any], environment: Mapping[str, str], log: Path) -> Engine:
        """Start an engine and wait until it accepts orders."""
        ours, theirs = socket.socketpair()
        with log.open("wb") as output, theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(PROGRAM), json.dumps(settings)),
                *("--launcher-fd", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env={**ENVIRONMENT, **os.environ, **environment},
            )
        answers, orders = await asyncio.open_connection(sock=ours)
        if not await answers.readline():
            sys.exit(f"an engine did not start; its log ends with:\n{log.read_text()[-3000:]}")
        return cls(process, answers, orders)

    async def answer(
        self, request: str, prompt: list[int], max_tokens: int, params: Any
    ) -> tuple[float, float, dict[str, Any]]:
        """Return the times of the first and the last token, and the answer."""
        first, finished = self._expect("first", request), self._expect("finished", request)
        order = {"id": 0, "do": "add", "request": request, "prompt": prompt, "max_tokens": max_tokens}
        self._order({**order, "params": params})
        (first_at, _), (finished_at, answer) = await asyncio.gather(first, finished)
        return first_at, finished_at, answer

    async def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        self._last_order += 1
        reply = self._expect("id", self._last_order)
        self._order({"id": self._last_order, "do": "metric", "name": name})
        _, answer = await reply
        return float(sum(value for _, value in answer["samples"]))

    def free(self) -> None:
        """Let every thread run on every core, because NixlConnector pins all its engines to the same core."""
        for task in Path(f"/proc/{self._process.pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), range(os.cpu_count() or 1))

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def close(self) -> None:
        self._process.kill()
        await self._process.wait()
        self._reader.cancel()
        self._orders.close()

    def _order(self, order: Mapping[str, Any]) -> None:
        self._orders.write(json.dumps(order).encode() + b"\n")

    def _expect(self, kind: str, request: str | int) -> asyncio.Future[tuple[float, dict[str, Any]]]:
        return self._waiting.setdefault((kind, request), asyncio.get_running_loop().create_future())

    async def _read(self) -> None:
        while line := await self._answers.readline():
            answer = json.loads(line)
            for kind in ("first", "finished", "id"):
                waiting = self._waiting.pop((kind, answer.get(kind, "")), None)
                if waiting is not None:
                    waiting.set_result((time.perf_counter(), answer))
        for waiting in self._waiting.values():
            waiting.set_exception(ConnectionError("an engine has ended"))


@dataclass(frozen=True)
class System:
    """One engine or a pair of them that answers prompts."""

    name: str
    prefill: Engine | None
    decode: Engine
    bytes_metric: str

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let the engines run inside the block, and stop them after it."""
        engines = [engine for engine in (self.prefill, self.decode) if engine is not None]
        for engine in engines:
            engine.signal(signal.SIGCONT)
        yield
        for engine in engines:
            engine.signal(signal.SIGSTOP)

    async def measure(self, prompts: Sequence[list[int]], max_tokens: int) -> Sample:
        before = await self.decode.metric(self.bytes_metric)
        timings = await asyncio.gather(*(self._one(prompt, max_tokens) for prompt in prompts))
        return Sample(
            ttft_s=statistics.mean(ttft for ttft, _ in timings),
            itl_s=statistics.mean(itl for _, itl in timings),
            num_bytes=int(await self.decode.metric(self.bytes_metric) - before),
        )

    async def _one(self, prompt: list[int], max_tokens: int) -> tuple[float, float]:
        request = f"{random.getrandbits(64):x}"
        started = time.perf_counter()
        params = None
        if self.prefill is not None:
            _, _, answer = await self.prefill.answer(request, prompt, 1, OFFER)
            params = answer["params"]
            assert params, f"{self.name}: the prefill node made no offer"
        first, last, answer = await self.decode.answer(request, prompt, max_tokens, params)
        assert answer["reason"] == "length", f"{self.name}: {answer}"
        return first - started, (last - first) / (max_tokens - 1)


# -- the systems -------------------------------------------------------------------------------------


def transfers(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the KV transfer configurations by name."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        if name == "nixl":
            if importlib.util.find_spec("nixl") is None:
                print("NixlConnector is not measured: nixl is not installed", flush=True)
                continue
            found[name] = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        else:
            found[f"kvferry {name}"] = {
                "kv_connector": "KvferryConnector",
                "kv_connector_module_path": "kvferry.connector.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"transport": name},
            }
    return found


def settings(model: Path, shapes: Sequence[Shape], transfer: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's engine arguments, with a pool a little larger than the largest shape."""
    num_blocks = max(-(-(shape.num_tokens + 64) // BLOCK_SIZE) * shape.concurrency for shape in shapes)
    return {
        "model": str(model),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": max(shape.num_tokens for shape in shapes) + 64,
        "enforce_eager": True,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": num_blocks + num_blocks // 4 + 2,
        "max_num_seqs": max(shape.concurrency for shape in shapes),
        "enable_prefix_caching": False,
        "kv_transfer_config": transfer,
    }


def write_model(folder: Path, max_tokens: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

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


@asynccontextmanager
async def running(folder: Path, shapes: Sequence[Shape], names: Sequence[str]) -> AsyncIterator[list[System]]:
    """Start every system, two engines at a time. The single node is the decode node of the first pair, used alone."""
    write_model(folder / "model", 2 * max(shape.num_tokens for shape in shapes) + 64)
    systems: list[System] = []
    async with AsyncExitStack() as stack:
        for name, transfer in transfers(names).items():
            engines = await asyncio.gather(
                *(
                    Engine.start(
                        settings(folder / "model", shapes, transfer),
                        {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(next(NIXL_PORTS))},
                        folder / f"{name} {role}.log",
                    )
                    for role in ("prefill", "decode")
                )
            )
            for engine in engines:
                stack.push_async_callback(engine.close)
            systems.append(System(name, *engines, NIXL_BYTES if name == "nixl" else KVFERRY_BYTES))
            print(f"{name}: both engines run", flush=True)
            for engine in engines:
                engine.free()
                engine.signal(signal.SIGSTOP)
        yield [System("one node", None, systems[0].decode, systems[0].bytes_metric), *systems]


# -- measuring ---------------------------------------------------------------------------------------


async def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    rows = []
    async with running(folder, arguments.shapes, arguments.connectors) as systems:
        for shape in arguments.shapes:
            samples: dict[str, list[Sample]] = {system.name: [] for system in systems}
            for number in range(arguments.rounds + 1):
                for system in random.sample(systems, len(systems)):
                    prompts = [_prompt(shape.num_tokens) for _ in range(shape.concurrency if number else 1)]
                    with system.awake():
                        await asyncio.sleep(SETTLE_S)
                        sample = await system.measure(prompts, arguments.max_tokens)
                    if number:  # round 0, of one prompt, only warms up
                        samples[system.name].append(sample)
            rows += _rows(shape, samples)
            _show(rows[-len(systems) :])
    return rows


def _prompt(num_tokens: int) -> list[int]:
    return random.choices(range(3, VOCABULARY), k=num_tokens)


def _rows(shape: Shape, samples: Mapping[str, Sequence[Sample]]) -> list[dict[str, Any]]:
    """Return one row per system, with ratios to NixlConnector if it takes part."""
    alone, nixl = samples["one node"], samples.get("nixl")
    return [
        {
            **asdict(shape),
            "system": name,
            "ttft_s": statistics.median(sample.ttft_s for sample in own),
            "best_ttft_s": min(sample.ttft_s for sample in own),
            "itl_s": statistics.median(sample.itl_s for sample in own),
            "added_s": statistics.median(a.ttft_s - b.ttft_s for a, b in zip(own, alone, strict=True)),
            **_ratios(own, alone, "ratio"),
            **({} if nixl is None else _ratios(own, nixl, "to_nixl")),
            "num_bytes": statistics.median(sample.num_bytes for sample in own),
            "bytes_ratio": statistics.median(sample.num_bytes for sample in own)
            / (shape.num_bytes * shape.concurrency),
        }
        for name, own in samples.items()
    ]


def _ratios(own: Sequence[Sample], other: Sequence[Sample], name: str) -> dict[str, float]:
    """Return the medians of the ratios to another system's times in the same round."""
    pairs = list(zip(own, other, strict=True))
    return {
        f"ttft_{name}": statistics.median(a.ttft_s / b.ttft_s for a, b in pairs),
        f"itl_{name}": statistics.median(a.itl_s / b.itl_s for a, b in pairs),
    }


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table. *of nixl* is the ratio to NixlConnector's time."""
    print(f"\n{rows[0]['num_tokens']} prompt tokens, {rows[0]['concurrency']} concurrent requests")
    titles = ("TTFT ms", "best", "ratio", "of nixl", "added ms", "ITL ms", "ratio", "of nixl", "MB", "ratio")
    print(f"  {'':<16}" + "".join(f"{title:>9}" for title in titles))
    for row in rows:
        cells = (
            *(f"{row['ttft_s'] * 1e3:.1f}", f"{row['best_ttft_s'] * 1e3:.1f}", f"{row['ttft_ratio']:.2f}"),
            *(_optional(row, "ttft_to_nixl"), f"{row['added_s'] * 1e3:.1f}", f"{row['itl_s'] * 1e3:.1f}"),
            *(f"{row['itl_ratio']:.2f}", _optional(row, "itl_to_nixl"), f"{row['num_bytes'] / 1e6:.1f}"),
            f"{row['bytes_ratio']:.2f}",
        )
        print(f"  {row['system']:<16}" + "".join(f"{cell:>9}" for cell in cells), flush=True)


def _optional(row: Mapping[str, Any], key: str) -> str:
    return f"{row[key]:.2f}" if key in row else "-"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    shapes = ["128x1", "128x8", "1024x1", "1024x8", "4096x1", "4096x8"]
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=Shape.parse,
        default=[Shape.parse(text) for text in shapes],
        metavar="TOKENSxREQUESTS",
        help=f"prompt tokens x concurrent requests (default: {' '.join(shapes)})",
    )
    connectors = ["shm", "zeromq", "ucx", "nixl"]
    parser.add_argument(
        "--connectors",
        nargs="+",
        default=connectors,
        metavar="NAME",
        help=f"transports of kvferry, or nixl (default: {' '.join(connectors)})",
    )
    parser.add_argument("--rounds", type=int, default=7, help="rounds per shape (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=8, help="tokens per answer (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(measure(arguments, Path(folder)))
    print(f"\nload average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
