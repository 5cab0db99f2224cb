"""A model over several worker processes: it gives the tokens of one process, and no process outlives the
others.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector.config import KVTransferConfig
from kvferry.lab.engine.errors import EngineDeadError
from kvferry.lab.engine.parallel.group import WorkerGroup
from kvferry.lab.engine.parallel.messages import Ready, Stop
from kvferry.lab.engine.settings import EngineSettings
from kvferry.lab.engine.types import GenerationRequest, SamplingParams
from tests.support.client import wait_until
from tests.support.engines import running_engine

#: Slow, because each worker process imports PyTorch.
pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

#: Three layers; keys and values; two heads of 16 floats.
BYTES_A_TOKEN = 3 * 2 * 2 * 16 * 4

#: One token, one block, a block and a token, and two of several chunks that share a prefix.
PROMPTS = [[9], [*range(4)], [*range(20, 25)], [*range(30, 70)], [*range(30, 62), 1, 2, 3]]


@pytest.fixture(scope="module")
def spread(make_module_node: Any) -> Any:
    """A node with two ranks that offers and loads. Its pool is too small for all prompts at once."""
    return make_module_node(
        connector="shm", role="kv_both", tensor_parallel_size=2, num_threads=1, num_blocks=40
    )


@pytest.mark.full
def test_answers_are_those_of_one_process_even_if_requests_are_preempted(
    spread: Any, assert_same: Any
) -> None:
    for index, prompt in enumerate(PROMPTS):
        spread.add(f"t{index}", prompt, max_tokens=30)
    spread.run()
    for index, prompt in enumerate(PROMPTS):
        assert_same(spread.tokens(f"t{index}"), "llama", prompt, 30)
    assert spread.core.stats().totals.num_preemptions > 0
    assert spread.is_whole


def hand_over(drive: Any, producer: Any, consumer: Any, name: str, prompt: Sequence[int]) -> None:
    """Prefill on one node and decode nine tokens on the other. Returns once all blocks of both are free."""
    producer.add(name, prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    drive(producer, until=lambda: producer.is_over(name))
    consumer.add(name, prompt, max_tokens=9, kv_transfer_params=producer.last(name).kv_transfer_params)
    drive(producer, consumer, until=lambda: consumer.is_over(name))
    drive(producer, consumer, until=lambda: producer.is_whole and consumer.is_whole)


@pytest.mark.parametrize(
    ("block_size", "layout"), [(4, "uniform"), (8, "per-layer"), (2, "uniform")], ids=str
)
@pytest.mark.parametrize("splits", [False, True], ids=["2 to 1", "1 to 2"])
def test_a_prompt_is_handed_over_between_two_ranks_and_one(
    splits: bool, block_size: int, layout: str, spread: Any, make_node: Any, drive: Any, assert_same: Any
) -> None:
    single = make_node(connector="shm", role="kv_both", block_size=block_size, layout=layout)
    producer, consumer = (single, spread) if splits else (spread, single)
    # The prompt has several chunks and a partial block, and is in neither prefix cache.
    name, prompt = f"{block_size}-{splits}", [100 * splits + block_size, *range(7, 50)]
    hand_over(drive, producer, consumer, name, prompt)
    last = consumer.last(name)
    assert_same(consumer.tokens(name), "llama", prompt, 9)
    assert (last.metrics.num_loaded_tokens, last.metrics.transfer.error) == (len(prompt), "")
    assert last.metrics.transfer.num_bytes == len(prompt) * BYTES_A_TOKEN


def test_waiting_for_a_worker_that_does_not_reply_is_bounded() -> None:
    group = WorkerGroup(1)
    os.kill(group.workers[0].pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=r"timed out .* ranks \[0\]"):
        group.ask([Stop()], Ready, 0.01)
    assert group.workers == []


def test_a_worker_ends_when_the_process_that_started_it_is_gone() -> None:
    group = WorkerGroup(1)
    (worker,) = group.workers
    worker.channel.close()
    assert worker.exit_status(60.0) == 1
    group.kill()


async def test_when_a_rank_is_killed_its_node_says_why_and_its_offers_are_recomputed(
    make_node: Any, drive: Any, tiny_model: Callable[[str], Path], assert_same: Any
) -> None:
    prompt = [3, *range(20, 60)]
    decode = make_node(connector="shm", role="kv_consumer")
    settings = EngineSettings(
        str(tiny_model("llama")),
        block_size=4,
        num_blocks=120,
        num_threads=1,
        tensor_parallel_size=2,
        kv_transfer=KVTransferConfig("shm", "kv_producer"),
    )
    with running_engine(settings) as engine:
        pids = engine._started().parts.executor.worker_pids
        whole = [output async for output in engine.generate(_request("a", prompt, 1))]
        decode.add("a", prompt, max_tokens=9, kv_transfer_params=whole[-1].kv_transfer_params)
        outputs = engine.generate(_request("b", prompt, 400))
        await anext(outputs)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="rank 1 .* was killed by SIGKILL"):
            async for _ in outputs:
                pass
        assert "SIGKILL" in engine.stats().error
        assert not engine.stats().healthy
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        drive(decode, until=lambda: decode.is_over("a"))
    assert_same(decode.tokens("a"), "llama", prompt, 9)
    assert decode.num_loads[1] == 1


def _request(request_id: str, prompt: Sequence[int], max_tokens: int) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(request_id, tuple(prompt), sampling, {"do_remote_decode": True})


def test_a_rank_whose_handoff_thread_died_is_noticed_while_there_is_nothing_to_do(
    tiny_model: Callable[[str], Path],
) -> None:
    faults = [{"kind": "raise", "at": "wait_events", "nth": nth, "error": "OSError"} for nth in range(2, 40)]
    transfer = KVTransferConfig(
        "FaultyConnector",
        "kv_both",
        kv_connector_module_path="kvferry.connector.testing",
        kv_connector_extra_config={"transport_options": {"faults": faults}},
    )
    settings = EngineSettings(
        str(tiny_model("llama")),
        block_size=4,
        num_blocks=60,
        num_threads=1,
        tensor_parallel_size=2,
        kv_transfer=transfer,
    )
    with running_engine(settings) as engine:
        wait_until(lambda: "injected by a test" in engine.stats().transfer_error)
        assert engine.stats().healthy
