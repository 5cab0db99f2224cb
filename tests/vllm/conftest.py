"""Real vLLM engines in child processes, with a tiny model whose answers depend on every token before them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("vllm") is None:  # `make test-vllm` has a venv with it
    collect_ignore_glob = ["test_*.py"]

PROGRAM = Path(__file__).with_name("node_program.py")
#: An engine takes half a minute to start on two idle cores.
START_S = 240.0
ANSWER_S = 60.0
BLOCK_SIZE = 32
NUM_BLOCKS = 128

Answer = dict[str, Any]


class Node:
    """One engine in a process group of its own.

    Args:
        model: The model's folder.
        log: File for what it prints.
        extra: `kv_connector_extra_config`.
        settings: More of vLLM's engine arguments.
    """

    def __init__(self, model: Path, log: Path, extra: dict[str, Any], **settings: Any) -> None:
        self._log = log
        self._arrived = threading.Condition()
        self._answers: list[Answer] = []
        self._num_orders = 0
        readable, writable = os.pipe()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, PROGRAM, str(writable), json.dumps(_settings(model, extra) | settings)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[writable],
                start_new_session=True,
                env=_environment(),
                text=True,
            )
        os.close(writable)
        self._pipe = os.fdopen(readable)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def wait_until_ready(self) -> Node:
        self._take(lambda answer: "ready" in answer, START_S)
        return self

    @property
    def log(self) -> str:
        return self._log.read_text()

    # -- orders --------------------------------------------------------------------------------------

    def order(self, do: str, **arguments: Any) -> Answer:
        """Have the engine do something, and wait until it did."""
        self._num_orders += 1
        number = self._num_orders
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"id": number, "do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._take(lambda answer: answer.get("id") == number, ANSWER_S)

    def start(self, request: str, prompt: list[int], max_tokens: int = 1, params: Any = None) -> None:
        self.order("add", request=request, prompt=prompt, max_tokens=max_tokens, params=params)

    def result(self, request: str, timeout_s: float = ANSWER_S) -> Answer:
        return self._take(lambda answer: answer.get("finished") == request, timeout_s)

    def ask(self, request: str, prompt: list[int], max_tokens: int = 1, params: Any = None) -> Answer:
        self.start(request, prompt, max_tokens, params)
        return self.result(request)

    def wait_for_status(self, is_so: Callable[[Answer], bool]) -> Answer:
        deadline = time.monotonic() + ANSWER_S
        while not is_so(status := self.order("status")):
            assert time.monotonic() < deadline, f"still {status}"
        return status

    # -- the process ---------------------------------------------------------------------------------

    def signal(self, number: signal.Signals) -> None:
        """To the engine and every process of it."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End it at once, whatever it is doing."""
        self.signal(signal.SIGKILL)
        self._reap()

    def stop(self) -> int:
        """End it as an operator would, and return its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return self._process.wait(ANSWER_S)
        finally:
            self.close()

    def close(self) -> None:
        """Leave nothing behind, whatever state it is in. Idempotent."""
        try:
            self.signal(signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._reap()

    def _reap(self) -> None:
        self._process.wait(ANSWER_S)
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass
        self._reader.join(ANSWER_S)
        self._pipe.close()

    # -- answers -------------------------------------------------------------------------------------

    def _read(self) -> None:
        for line in self._pipe:
            with self._arrived:
                self._answers.append(json.loads(line))
                self._arrived.notify_all()
        with self._arrived:
            self._answers.append({"ended": True})
            self._arrived.notify_all()

    def _take(self, is_wanted: Callable[[Answer], bool], timeout_s: float) -> Answer:
        def found() -> bool:
            return any(is_wanted(answer) or "ended" in answer for answer in self._answers)

        with self._arrived:
            assert self._arrived.wait_for(found, timeout_s), (
                f"no answer; its log ends with\n{self.log[-4000:]}"
            )
            wanted = next((answer for answer in self._answers if is_wanted(answer)), None)
            assert wanted is not None, f"the engine is gone; its log ends with\n{self.log[-4000:]}"
            self._answers.remove(wanted)
            return wanted


def _settings(model: Path, extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": str(model),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "enforce_eager": True,
        "block_size": BLOCK_SIZE,
        "num_gpu_blocks_override": NUM_BLOCKS,
        "max_num_seqs": 4,
        "kv_transfer_config": {
            "kv_connector": "KvferryConnector",
            "kv_connector_module_path": "kvferry.connector.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        },
    }


def _environment() -> dict[str, str]:
    return os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama. Its weights are large, so that each token of a prompt changes the answer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def start_node(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Node]]:
    """Start an engine; `wait_until_ready` is the caller's, so that several can start together."""
    nodes: list[Node] = []

    def start(**arguments: Any) -> Node:
        log = tmp_path_factory.mktemp("node") / "log"
        extra = arguments.pop("extra", {"transport": "shm"})
        nodes.append(Node(model, log, extra, **arguments))
        return nodes[-1]

    yield start
    for node in nodes:
        node.close()


@pytest.fixture(scope="session")
def pair(start_node: Callable[..., Node]) -> tuple[Node, Node]:
    """A prefill and a decode node that live as long as the tests."""
    prefill, decode = start_node(), start_node()
    return prefill.wait_until_ready(), decode.wait_until_ready()
