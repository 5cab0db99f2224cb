"""A reference node serves each field of vLLM's requests, or refuses it by its name."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.lab.node.openai_request import WITHOUT_EFFECT, parse_chat, parse_completion
from kvferry.router.http.api_pages import fields_of
from kvferry.router.http.errors import ApiError

_OF_VLLM = "vllm.entrypoints.openai"
#: Earlier releases have them elsewhere, and fewer fields.
chats = pytest.importorskip(f"{_OF_VLLM}.chat_completion.protocol")
completions = pytest.importorskip(f"{_OF_VLLM}.completion.protocol")

REQUESTS = {
    "/v1/completions": (completions.CompletionRequest, parse_completion, {"prompt": "a"}),
    "/v1/chat/completions": (
        chats.ChatCompletionRequest,
        parse_chat,
        {"messages": [{"role": "user", "content": "a"}]},
    ),
}
#: Without tools, which are refused, both of its values ask for nothing.
ASKS_FOR_NOTHING = {"parallel_tool_calls"}


@pytest.mark.parametrize("path", REQUESTS)
def test_each_field_of_vllm_is_served_or_refused_and_its_default_accepted(path: str) -> None:
    kind, parse, body = REQUESTS[path]
    for name, field in kind.model_fields.items():
        if name in fields_of(path) | WITHOUT_EFFECT:
            continue
        default = field.get_default(call_default_factory=True)
        parse({**body, name: default})
        values: list[Any] = ["something", [1], {"a": 1}]
        if isinstance(default, bool) and name not in ASKS_FOR_NOTHING:
            values.append(not default)
        for value in values:
            with pytest.raises(ApiError, match=f"^{name}=") as refused:
                parse({**body, name: value})
            assert (refused.value.status, refused.value.param) == (400, name)
