"""An exception on behalf of one request ends that request, and the others get their answers.

In each test one call that the engine makes to the outside raises, while three requests run together.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import kvferry.lab.engine.batch
import kvferry.lab.engine.runner
from kvferry.connector.config import KVTransferConfig
from kvferry.lab.engine.core import MAX_FAILED_STEPS_IN_A_ROW, EngineCore
from kvferry.lab.engine.engine import Engine
from kvferry.lab.engine.errors import EngineDeadError
from kvferry.lab.engine.settings import EngineSettings
from kvferry.lab.engine.types import GenerationRequest, RequestOutput, SamplingParams
from tests.support.engines import running_engine
from tests.support.patience import DEADLINE_S, until

VICTIM = "victim"
#: A token near the end of the victim's prompt, and the victim's seed. No other request has either.
MARK, VICTIM_SEED = 250, 777
PROMPTS = {"a": tuple(range(1, 21)), VICTIM: (*range(40, 58), MARK, 3), "b": tuple(range(90, 115))}
SAMPLING = {
    "a": SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
    VICTIM: SamplingParams(max_tokens=8, temperature=0.7, seed=VICTIM_SEED, ignore_eos=True),
    "b": SamplingParams(max_tokens=8, temperature=0.9, seed=5, ignore_eos=True),
}

Sabotage = Callable[[EngineCore, pytest.MonkeyPatch], None]


class Boom(Exception):
    """An exception of an undocumented type."""


def is_victim(request: Any) -> bool:
    return bool(request.request_id.startswith(VICTIM))


@pytest.fixture
def settings(tiny_model: Callable[[str], Path]) -> EngineSettings:
    return EngineSettings(
        model=str(tiny_model("llama")),
        block_size=4,
        num_blocks=120,
        max_model_len=400,
        max_num_batched_tokens=24,
        max_num_seqs=4,
        kv_transfer=KVTransferConfig("shm", "kv_both"),
    )


@pytest.fixture
def deaths() -> list[str]:
    """The errors of engines that died."""
    return []


@pytest.fixture
def engine_(settings: EngineSettings, deaths: list[str]) -> Iterator[Engine]:
    with running_engine(settings, deaths) as engine:
        yield engine


def request_of(name: str) -> GenerationRequest:
    return GenerationRequest(name, PROMPTS[name], SAMPLING[name])


async def answer(engine: Engine, request: GenerationRequest) -> list[RequestOutput]:
    async with asyncio.timeout(DEADLINE_S):
        return [output async for output in engine.generate(request)]


async def ask_all(engine: Engine) -> dict[str, list[RequestOutput]]:
    answers = await asyncio.gather(*(answer(engine, request_of(name)) for name in PROMPTS))
    return dict(zip(PROMPTS, answers, strict=True))


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def is_whole(engine: Engine) -> bool:
    stats = engine.stats()
    busy = stats.num_waiting + stats.num_loading + stats.num_running + stats.num_offered
    return busy == 0 and stats.num_free_blocks == stats.num_blocks


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(tiny_model: Callable[[str], Path]) -> dict[str, list[int]]:
    """The answer to each request when it runs alone."""
    settings = EngineSettings(model=str(tiny_model("llama")), block_size=4, num_blocks=120)
    with running_engine(settings) as engine:
        return {name: tokens(await answer(engine, request_of(name))) for name in PROMPTS}


# -- what raises ---------------------------------------------------------------------------------------------


def hasher_at(num_tokens: int) -> Sabotage:
    """Make the block hasher raise once the victim has this many tokens."""

    def sabotage(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
        hasher = core.parts.hasher

        def raising(request: Any) -> Any:
            if is_victim(request) and request.num_tokens >= num_tokens:
                raise Boom
            return hasher(request)

        monkeypatch.setattr(core, "parts", replace(core.parts, hasher=raising))

    return sabotage


def tokenizer(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = core.parts.model.tokenizer.decode

    def raising(token_ids: list[int], **options: Any) -> Any:
        if MARK in token_ids:
            raise Boom
        return decode(token_ids, **options)

    monkeypatch.setattr(core.parts.model.tokenizer, "decode", raising)


def sampler(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = kvferry.lab.engine.runner.sample

    def raising(logits: Any, samplers: Any) -> list[int]:
        tokens = sample(logits, samplers)
        if any(one.params.seed == VICTIM_SEED for one in samplers):
            raise Boom
        return tokens

    monkeypatch.setattr(kvferry.lab.engine.runner, "sample", raising)


def draws(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the victim's random numbers raise, after those for earlier requests in the batch were drawn."""
    make = kvferry.lab.engine.batch.TokenSampler

    class BrokenStream:
        def __init__(self, stream: Any) -> None:
            self.get_state, self.set_state = stream.get_state, stream.set_state

    def making(params: SamplingParams, *more: Any) -> Any:
        one = make(params, *more)
        if params.seed == VICTIM_SEED:
            one.generator = BrokenStream(one.generator)  # type: ignore[assignment]
        return one

    monkeypatch.setattr(kvferry.lab.engine.batch, "TokenSampler", making)


def sampler_parameters(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    make = kvferry.lab.engine.batch.TokenSampler

    def raising(params: SamplingParams, *more: Any) -> Any:
        if params.seed == VICTIM_SEED:
            raise OSError(24, "Unable to open /dev/urandom: Boom")
        return make(params, *more)

    monkeypatch.setattr(kvferry.lab.engine.batch, "TokenSampler", raising)


def inputs_from(num_computed_tokens: int) -> Sabotage:
    """Make the preparation of a step's inputs raise once this many of the victim's tokens are computed."""

    def sabotage(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
        batch = core.parts.executor.runner._batch  # type: ignore[attr-defined]
        make_inputs = batch.make_inputs

        def raising(plan: Any) -> Any:
            for item in plan.scheduled_requests:
                if is_victim(item.request) and item.request.num_computed_tokens >= num_computed_tokens:
                    raise Boom
            return make_inputs(plan)

        monkeypatch.setattr(batch, "make_inputs", raising)

    return sabotage


def forward_pass(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = core.parts.executor.runner  # type: ignore[attr-defined]
    forward = runner._forward

    def raising(inputs: Any) -> Any:
        tokens = forward(inputs)
        if MARK in inputs.input_ids.tolist()[0]:
            raise Boom
        return tokens

    monkeypatch.setattr(runner, "_forward", raising)


PLACES: dict[str, Sabotage] = {
    "block hasher at admission": hasher_at(0),
    "block hasher of a generated token": hasher_at(23),
    "tokenizer while text is made of tokens": tokenizer,
    "sampler": sampler,
    "random numbers": draws,
    "sampling parameters": sampler_parameters,
    "inputs of the first step": inputs_from(0),
    "inputs of a late step": inputs_from(24),
    "forward pass": forward_pass,
}


@pytest.mark.parametrize("place", PLACES)
async def test_an_exception_for_one_request_ends_only_that_request(
    place: str,
    engine_: Engine,
    deaths: list[str],
    expected: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patches:
        PLACES[place](engine_._started(), patches)
        answers = await ask_all(engine_)
    *_, last = answers[VICTIM]
    assert last.finish_reason == "error"
    assert "Boom" in last.error or place == "random numbers"
    assert tokens(answers["a"]) == expected["a"]
    assert tokens(answers["b"]) == expected["b"]
    assert [one[-1].finish_reason for one in (answers["a"], answers["b"])] == ["length", "length"]
    assert any(record.exc_info for record in caplog.records)  # the traceback is logged
    await until(lambda: is_whole(engine_))
    assert engine_.stats().healthy
    assert deaths == []
    assert tokens(await answer(engine_, request_of(VICTIM))) == expected[VICTIM]


async def test_a_step_that_fails_for_no_particular_request_costs_only_time(
    engine_: Engine, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = engine_._started().parts.executor.runner  # type: ignore[attr-defined]
    forward, calls = runner._forward, []

    def raising(inputs: Any) -> Any:
        calls.append(len(inputs.samplers))
        if calls.count(3) == 1 and calls[-1] == 3:  # the first step in which all three requests get a token
            raise Boom
        return forward(inputs)

    monkeypatch.setattr(runner, "_forward", raising)
    assert {name: tokens(outputs) for name, outputs in (await ask_all(engine_)).items()} == expected
    assert 3 in calls


async def test_requests_are_answered_while_no_file_can_be_opened(engine_: Engine) -> None:
    """A sampled request without a seed draws one, which must not open a file."""
    await answer(engine_, request_of("a"))  # opens whatever the first request needs
    unseeded = replace(SAMPLING["b"], seed=None)
    with no_more_descriptors():
        outputs = await answer(engine_, GenerationRequest("b", PROMPTS["b"], unseeded))
    assert len(tokens(outputs)) == 8
    assert engine_.stats().healthy


@contextlib.contextmanager
def no_more_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.dup(0)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- what the engine does not survive ---------------------------------------------------------------------


def block_manager(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*arguments: Any) -> Any:
        raise Boom

    monkeypatch.setattr(core.parts.manager, "cache_blocks", raising)


def model(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*arguments: Any, **options: Any) -> Any:
        raise Boom

    monkeypatch.setattr(core.parts.executor.runner._model, "forward", raising)  # type: ignore[attr-defined]


@pytest.mark.parametrize("sabotage", [block_manager, model])
async def test_an_engine_that_cannot_continue_tells_every_request_why_and_then_its_process(
    sabotage: Sabotage, engine_: Engine, deaths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(engine_._started(), monkeypatch)
    requests = [asyncio.create_task(answer(engine_, request_of(name))) for name in PROMPTS]
    await asyncio.wait(requests)
    errors = [str(task.exception()) for task in requests]
    assert len(errors) == 3
    await until(lambda: bool(deaths))
    assert set(errors) == set(deaths)
    assert "Boom" in deaths[0]
    assert len(deaths) == 1
    assert not engine_.stats().healthy
    with pytest.raises(EngineDeadError, match="Boom"):
        await answer(engine_, request_of("a"))


async def test_an_engine_ends_after_too_many_failed_requests_in_a_row(
    engine_: Engine, deaths: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own check passes, but no request can be computed, so the engine must not count as
    healthy.
    """

    def raising(*arguments: Any) -> Any:
        raise Boom

    runner = engine_._started().parts.executor.runner  # type: ignore[attr-defined]
    monkeypatch.setattr(runner._batch, "make_inputs", raising)
    for _ in range(MAX_FAILED_STEPS_IN_A_ROW):
        assert (await answer(engine_, request_of("a")))[-1].finish_reason == "error"
        assert engine_.stats().healthy
    with pytest.raises(EngineDeadError, match=f"{MAX_FAILED_STEPS_IN_A_ROW + 1} requests failed"):
        await answer(engine_, request_of("a"))
    await until(lambda: bool(deaths))


def test_closing_an_engine_is_not_reported_as_its_death(settings: EngineSettings, deaths: list[str]) -> None:
    with running_engine(settings, deaths):
        pass
    assert deaths == []
    assert "kvferry-engine" not in {thread.name for thread in threading.enumerate()}
