"""The engine as a server uses it: asyncio on one side, a thread that runs steps on the other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.lab.engine.engine import Engine
from kvferry.lab.engine.errors import InvalidRequestError, PromptTooLongError
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
