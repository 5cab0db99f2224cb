"""The engine as a server uses it: asyncio on one side, a thread that runs steps on the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector.config import KVTransferConfig
from kvferry.connector.errors import ConnectorError
from kvferry.lab.engine.engine import Engine
from kvferry.lab.engine.errors import EngineDeadError, InvalidRequestError, PromptTooLongError
from kvferry.lab.engine.settings import EngineSettings
from kvferry.lab.engine.types import GenerationRequest, RequestOutput, SamplingParams
from tests.support.engines import running_engine
from tests.support.patience import DEADLINE_S


@pytest.fixture
def engine(tiny_model: Callable[[str], Path]) -> Iterator[Engine]:
    with running_engine(_settings(tiny_model)) as engine:
        yield engine


def _settings(tiny_model: Callable[[str], Path], **more: Any) -> EngineSettings:
    return EngineSettings(
        model=str(tiny_model("llama")),
        block_size=4,
        num_blocks=120,
        max_model_len=400,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        **more,
    )


def _request(request_id: str, *prompt: int, params: Any = None, **sampling: Any) -> GenerationRequest:
    settings = {"temperature": 0.0, "ignore_eos": True, **sampling}
    return GenerationRequest(request_id, prompt, SamplingParams(**settings), params)


async def _all(outputs: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in outputs]


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.001)


def _is_whole(engine: Engine) -> bool:
    stats = engine.stats()
    return stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks == stats.num_blocks


async def test_an_answer_comes_piece_by_piece(engine: Engine) -> None:
    outputs = await _all(engine.generate(_request("a", 1, 2, 3, max_tokens=8)))
    assert [len(output.new_token_ids) for output in outputs] == [1] * 8
    assert [output.finish_reason for output in outputs] == [None] * 7 + ["length"]
    token_ids = [token for output in outputs for token in output.new_token_ids]
    text = "".join(output.text_delta for output in outputs)
    assert text == engine.tokenizer.decode(token_ids, skip_special_tokens=True)
    assert _is_whole(engine)


async def test_each_of_many_concurrent_requests_gets_its_own_answer(engine: Engine) -> None:
    requests = [_request(f"r{i}", i, i + 1, max_tokens=6) for i in range(12)]
    answers = await asyncio.gather(*[_all(engine.generate(request)) for request in requests])
    for index, outputs in enumerate(answers):
        assert {output.request_id for output in outputs} == {f"r{index}"}
        assert outputs[-1].metrics.num_output_tokens == 6
    assert _is_whole(engine)


async def test_closing_the_generator_aborts_the_request(engine: Engine) -> None:
    outputs = engine.generate(_request("a", *range(50), max_tokens=300))
    await anext(outputs)
    await outputs.aclose()
    await _until(lambda: _is_whole(engine))
    assert engine.stats().totals.num_finished == {"abort": 1}


async def test_cancelling_the_task_aborts_the_request(engine: Engine) -> None:
    task = asyncio.create_task(_all(engine.generate(_request("a", *range(50), max_tokens=300))))
    await _until(lambda: engine.stats().num_running == 1)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await _until(lambda: _is_whole(engine))


async def test_abort_ends_the_answer_with_its_finish_reason(engine: Engine) -> None:
    task = asyncio.create_task(_all(engine.generate(_request("a", 1, 2, max_tokens=300))))
    await _until(lambda: engine.stats().totals.num_output_tokens > 0)
    engine.abort("a")
    engine.abort("unknown")
    outputs = await task
    assert outputs[-1].finish_reason == "abort"
    assert len(outputs) < 300


async def test_a_refused_request_raises_and_the_engine_keeps_running(engine: Engine) -> None:
    with pytest.raises(PromptTooLongError) as too_long:
        await _all(engine.generate(_request("long", *[1] * 400)))
    assert (too_long.value.num_prompt_tokens, too_long.value.max_prompt_tokens) == (400, 399)
    first = engine.generate(_request("a", 1, max_tokens=300))
    await anext(first)
    with pytest.raises(InvalidRequestError, match="in use"):
        await _all(engine.generate(_request("a", 2)))
    await anext(first)
    await first.aclose()
    assert len(await _all(engine.generate(_request("b", 1, max_tokens=2)))) == 2


async def test_before_start_and_after_close_nothing_is_served(tiny_model: Callable[[str], Path]) -> None:
    engine = Engine(_settings(tiny_model))
    with pytest.raises(EngineDeadError, match="not started"):
        await _all(engine.generate(_request("a", 1)))
    assert not engine.stats().healthy
    engine.start()
    assert engine.stats().healthy
    engine.close()
    engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        await _all(engine.generate(_request("a", 1)))
    with pytest.raises(EngineDeadError, match="once"):
        engine.start()


async def test_close_aborts_running_requests(tiny_model: Callable[[str], Path]) -> None:
    engine = Engine(_settings(tiny_model))
    engine.start()
    task = asyncio.create_task(_all(engine.generate(_request("a", 1, 2, max_tokens=300))))
    await _until(lambda: engine.stats().totals.num_output_tokens > 0)
    await asyncio.to_thread(engine.close)
    assert (await task)[-1].finish_reason == "abort"


async def test_when_the_step_loop_dies_every_request_fails_and_the_engine_reports_why(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = engine.generate(_request("a", 1, 2, max_tokens=300))
    await anext(outputs)
    core = engine._started()
    monkeypatch.setattr(core.parts.executor.runner, "_model", None)
    with pytest.raises(EngineDeadError, match="NoneType"):
        await _all(outputs)
    with pytest.raises(EngineDeadError, match="NoneType"):
        await _all(engine.generate(_request("b", 1)))
    assert not engine.stats().healthy
    assert "NoneType" in engine.stats().error


async def test_malformed_transfer_params_are_refused_and_the_node_keeps_running(
    tiny_model: Callable[[str], Path],
) -> None:
    settings = _settings(tiny_model, kv_transfer=KVTransferConfig("shm", "kv_both"))
    with running_engine(settings) as engine:
        for params in ({"do_remote_prefill": True}, {"do_remote_decode": "yes"}):
            with pytest.raises(ConnectorError):
                await _all(engine.generate(_request("a", 1, 2, params=params)))
        outputs = await _all(
            engine.generate(_request("b", 1, 2, params={"do_remote_decode": True}, max_tokens=1))
        )
        assert outputs[-1].kv_transfer_params is not None
        assert outputs[-1].kv_transfer_params["remote_num_tokens"] == 2
        assert engine.stats().num_offered == 1
