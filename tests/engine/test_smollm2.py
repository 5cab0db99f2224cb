"""The converted default model produces sensible text, and the same tokens as transformers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvferry.lab.engine.core import EngineCore
from kvferry.lab.engine.settings import DEFAULT_MODEL, EngineSettings
from kvferry.lab.engine.types import GenerationRequest, SamplingParams
from kvferry.lab.engine.weights import load_model, model_folder
from tests.support.answers import Answer
from tests.support.tiny_models import generate_greedily

pytestmark = pytest.mark.full

PROMPTS = [
    "The capital of France is",
    "A",
    "def fibonacci(n):",
    "Once upon a time, in a village by the sea, there lived an old fisherman who " * 6,
    "One, two, three, four, five, six, seven,",
]
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def core() -> Iterator[EngineCore]:
    core = EngineCore(EngineSettings(num_blocks=128, max_num_batched_tokens=64, num_threads=1))
    yield core
    core.close()


@pytest.fixture(scope="module")
def tokenizer(core: EngineCore) -> Any:
    return core.parts.model.tokenizer


def test_concurrent_prompts_get_the_answers_of_transformers(core: EngineCore, tokenizer: Any) -> None:
    prompts = {text: tuple(tokenizer.encode(text)) for text in PROMPTS}
    for text, prompt in prompts.items():
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=0)
        core.add(GenerationRequest(text, prompt, sampling), time.monotonic())
    answers = {text: Answer() for text in PROMPTS}
    while core.has_work:
        for output in core.step()[1]:
            answers[output.request_id] += output.new_token_ids
            answers[output.request_id].logprobs += [scores[0][1] for scores in output.logprobs]
    plain = load_model(model_folder(DEFAULT_MODEL), torch.float32, torch.device("cpu"), "sdpa")
    for text, prompt in prompts.items():
        assert answers[text] == generate_greedily(plain, prompt, NUM_TOKENS), text
    assert tokenizer.decode(answers[PROMPTS[0]]).startswith(" Paris")
