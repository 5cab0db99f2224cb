"""A reference node serves each field of a request, or refuses it by its name.

It drops none that would change the answer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from kvferry.lab.node.openai_request import (
    STREAM_OPTIONS_WITHOUT_EFFECT,
    WITHOUT_EFFECT,
    parse_chat,
    parse_completion,
)
from kvferry.router.http.api_pages import fields_of
from kvferry.router.http.errors import ApiError
from tests.support.deployments import ROOT

COMPLETION = "/v1/completions", parse_completion, {"prompt": "a"}
CHAT = "/v1/chat/completions", parse_chat, {"messages": [{"role": "user", "content": "a"}]}
#: Fields that once were dropped silently, with values that ask for something.
CONSTRAINTS: dict[str, Any] = {
    "stop_token_ids": [1],
    "allowed_token_ids": [1],
    "bad_words": ["a"],
    "structured_outputs": {"choice": ["a"]},
    "guided_json": {"type": "object"},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "truncate_prompt_tokens": 1,
    "include_stop_str_in_output": True,
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"a": 1},
    "continue_final_message": True,
    "documents": [{"text": "a"}],
    "reasoning_effort": "low",
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "parallel_tool_calls": 1,
    "logits_processors": ["a"],
    "typical_p": 0.5,
    "length_penalty": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.2,
    "lora_request": {"name": "a"},
    "vllm_xargs": {"a": 1},
    "logit_bias": {"1": 5},
    "prompt_logprobs": 0,
    "return_top_logits": 2,
    "echo": True,
    "prompt_items": [{"offset": 1}],
    "temprature": 0.5,
}
ENDPOINTS = pytest.mark.parametrize("endpoint", [COMPLETION, CHAT], ids=lambda endpoint: endpoint[0])


@pytest.mark.parametrize("name", CONSTRAINTS)
@ENDPOINTS
def test_what_would_change_an_answer_is_refused_by_its_name(endpoint: Any, name: str) -> None:
    _, parse, body = endpoint
    with pytest.raises(ApiError, match=f"^{name}=") as refused:
        parse({**body, name: CONSTRAINTS[name]})
    assert (refused.value.status, refused.value.param) == (400, name)
    assert refused.value.code == "unsupported_value"


@ENDPOINTS
def test_values_that_ask_for_nothing_are_accepted(endpoint: Any) -> None:
    """Clients and routers that write every field with its default must work."""
    _, parse, body = endpoint
    for nothing in (None, False, "", [], {}):
        parse({**body, "stop_token_ids": nothing, "lora_path": nothing, "no_stop_trim": nothing})
    defaults = {
        "skip_special_tokens": True,
        "separate_reasoning": True,
        "best_of": 1,
        "min_tokens": 0,
        "presence_penalty": 0.0,
    }
    parse({**body, **defaults, "tools": [], "tool_choice": "auto"})


@pytest.mark.parametrize(
    ("endpoint", "parameters"),
    [
        (COMPLETION, completion_create_params.CompletionCreateParamsBase),
        (CHAT, chat_create_params.CompletionCreateParamsBase),
    ],
    ids=["completion", "chat"],
)
def test_each_field_of_the_package_openai_is_served_or_refused(endpoint: Any, parameters: type) -> None:
    path, parse, body = endpoint
    for name in parameters.__annotations__:
        if name in fields_of(path) | WITHOUT_EFFECT:
            continue
        with pytest.raises(ApiError) as refused:
            parse({**body, name: "something"})
        assert refused.value.param == name


@ENDPOINTS
def test_each_field_that_is_served_is_read(endpoint: Any) -> None:
    """A node that did not look at one would answer as if it were not there."""
    path, parse, body = endpoint
    for name in fields_of(path):
        with pytest.raises(ApiError) as refused:
            parse({**body, "stream": True, name: [{}]})
        assert (refused.value.status, refused.value.param) == (400, name)


@ENDPOINTS
def test_options_of_a_stream_need_one(endpoint: Any) -> None:
    _, parse, body = endpoint
    options = {"stream_options": {"include_usage": True}}
    assert parse({**body, **options, "stream": True}).include_usage
    with pytest.raises(ApiError, match="need 'stream': true") as refused:
        parse({**body, **options})
    assert (refused.value.status, refused.value.param) == (400, "stream_options")


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


@pytest.mark.parametrize("without", [{"content": None}, {}], ids=["null", "absent"])
def test_a_history_with_tools_needs_no_content_beside_its_calls(without: dict[str, None]) -> None:
    turns = [
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "tool_calls": [CALL], "refusal": None, **without},
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "2"},
    ]
    ((chat,)) = parse_chat({"messages": turns}).prompts
    assert [(each.role, each.content, each.more) for each in chat.messages] == [
        ("user", "What is 1 + 1?", {}),
        ("assistant", "", {"tool_calls": [CALL]}),
        ("tool", "2", {"tool_call_id": "c1", "name": "add"}),
    ]


@pytest.mark.parametrize(
    "turn",
    [
        {"content": None},
        {"content": None, "tool_calls": []},
        {"content": "a", "tool_calls": "add"},
        {"content": "a", "tool_call_id": 1},
        {"content": "a", "audio": {"id": "a"}},
    ],
    ids=str,
)
def test_a_turn_that_says_nothing_or_what_is_not_known_is_refused(turn: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=r"^messages\[0\]\.") as refused:
        parse_chat({"messages": [{"role": "assistant", **turn}]})
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_a_prefill_may_ask_for_at_least_one_token() -> None:
    """vllm-router writes `min_tokens` into it. Elsewhere the engine does not support it."""
    offered = {"do_remote_decode": True}
    prefill = {"prompt": "a", "max_tokens": 1, "min_tokens": 1, "kv_transfer_params": offered}
    assert parse_completion(prefill).sampling.max_tokens == 1
    for change in ({"max_tokens": 2}, {"min_tokens": 2}, {"kv_transfer_params": None}):
        with pytest.raises(ApiError, match="min_tokens"):
            parse_completion({**prefill, **change})


def test_the_document_names_each_field_without_effect() -> None:
    text = Path(ROOT, "docs", "openai-api.md").read_text()
    for name in WITHOUT_EFFECT | STREAM_OPTIONS_WITHOUT_EFFECT:
        assert f"`{name}`" in text
