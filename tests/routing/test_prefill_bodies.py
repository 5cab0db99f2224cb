"""What a prefill node receives of a client's request."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.router.answer.bodies import must_compute_alone, prefill_body
from kvferry.router.answer.dialects import dialect_of
from kvferry.router.http.endpoints import CHATS, COMPLETIONS, GENERATE

#: Fields that change the prompt, or could.
ABOUT_THE_PROMPT: dict[str, Any] = {
    "cache_salt": "s",
    "add_special_tokens": False,
    "truncate_prompt_tokens": 9,
    "add_generation_prompt": True,
    "chat_template": "t",
    "chat_template_kwargs": {"a": 1},
    "tools": [{"type": "function"}],
    "tool_choice": "auto",
    "documents": [{"text": "d"}],
    "mm_processor_kwargs": {"b": 2},
    "reasoning_effort": "low",
    "a_field_of_next_year": 1,
}
ABOUT_TOKENS: dict[str, Any] = {
    "seed": 5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.1,
    "logprobs": 3,
    "top_logprobs": 3,
    "logprob_token_ids": [1],
    "logit_bias": {"1": 1},
    "top_p": 0.5,
    "min_p": 0.1,
    "stop": ["x"],
    "bad_words": ["y"],
    "structured_outputs": {"regex": "a+"},
    "guided_regex": "a+",
    "response_format": {"type": "json_object"},
    "prompt_logprobs": 1,
    "min_tokens": 2,
    "n": 1,
}


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_prefill_server_receives_what_its_cache_depends_on(temperature: float) -> None:
    prompt = {"model": "m", "prompt": "p", **ABOUT_THE_PROMPT}
    body = {**prompt, **ABOUT_TOKENS, "temperature": temperature, "max_tokens": 8, "stream": True}
    asked = prefill_body(body, dialect_of(CHATS if "messages" in body else COMPLETIONS))
    asked.pop("kv_transfer_params", None)
    assert asked == {**prompt, "temperature": 0, "max_tokens": 1, "stream": False}


def test_a_grammar_that_a_chat_template_may_read_stays() -> None:
    body = {"model": "m", "messages": [], "response_format": {"type": "json_object"}}
    asked = prefill_body(body, dialect_of(CHATS if "messages" in body else COMPLETIONS))
    assert asked["response_format"] == body["response_format"]


@pytest.mark.parametrize(
    ("fields", "is_alone"),
    [
        ({}, False),
        ({"use_beam_search": True}, True),
        ({"use_beam_search": False}, False),
        ({"prompt_logprobs": 0}, True),
        ({"prompt_logprobs": None}, False),
        ({"echo": True}, False),
        ({"logprobs": 2}, False),
        ({"echo": True, "logprobs": 0}, True),
        ({"echo": True, "messages": []}, True),
    ],
)
def test_a_prompt_that_no_server_would_load_is_computed_where_the_answer_is(
    fields: dict[str, Any], is_alone: bool
) -> None:
    path = CHATS if "messages" in fields else COMPLETIONS
    assert must_compute_alone({"prompt": "p", **fields}, dialect_of(path)) is is_alone


def test_sampling_parameters_of_token_ids_are_looked_into() -> None:
    dialect = dialect_of(GENERATE)
    assert must_compute_alone({"sampling_params": {"prompt_logprobs": 1}}, dialect)
    assert not must_compute_alone({"prompt_logprobs": 1, "sampling_params": {}}, dialect)
