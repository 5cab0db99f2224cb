"""How the endpoints that are handed over differ: what limits an answer, what only concerns it, how its stream
ends, and how it names the counts of tokens. One row each. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..http.endpoints import CHATS, COMPLETIONS, GENERATE, MESSAGES, RESPONSES
from ..http.errors import ApiError, bad_request
from ..http.sse import DONE, Event

#: Fields that only say how the tokens of an answer are chosen, and what it shows of them. A prefill node,
#: whose token is not used, does not receive them: they cost it time, and some make it fail. This is a list of
#: what to leave out, and not of what to keep, because a prompt that lacked an unknown field could be another
#: prompt, whose cache the decode node refuses. So `tools`, `tool_choice` and all that a chat template may
#: read stay.
_ONLY_FOR_SAMPLING = frozenset(
    {
        *("seed", "temperature", "top_p", "top_k", "min_p", "typical_p", "use_beam_search", "length_penalty"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "repetition_detection"),
        *("logit_bias", "allowed_token_ids", "bad_words", "logits_processors", "ignore_eos"),
        *("stop", "stop_token_ids", "include_stop_str_in_output"),
        *("logprobs", "top_logprobs", "logprob_token_ids", "prompt_logprobs"),
        *("return_tokens_as_token_ids", "return_token_ids"),
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("guided_decoding_backend", "guided_whitespace_pattern"),
    }
)
#: Fields about the answer. With `n` or `best_of` the prefill node would make one offer per answer, of which
#: only one is loaded.
_ONLY_FOR_DECODE = frozenset({"stream_options", "min_tokens", "n", "best_of"})
_LEFT_OUT = _ONLY_FOR_SAMPLING | _ONLY_FOR_DECODE | {"max_completion_tokens"}

#: Tools that OpenAI's server runs itself. A server of vLLM with a tool server answers in several turns then,
#: and each turn would need a handoff of its own.
SERVER_TOOLS = ("web_search", "code_interpreter", "container", "mcp", "file_search", "image_generation")


@dataclass(frozen=True, slots=True)
class UsageNames:
    """How the `usage` of an endpoint's answers names the counts of tokens.

    Attributes:
        prompt: Tokens of the prompt.
        answer: Tokens of the answer.
        details: More counts of the prompt; empty: they are in the usage itself.
        answer_details: More counts of the answer; empty: there are none.
        cached: Tokens of the prompt that were in a cache, among its details.
        written: Those that were written into one.
        is_prompt_the_rest: `prompt` counts only what the other two do not.
        needs_details: They may not be absent, so a count that is not known is 0.
        inside: The field in which some events of a stream have their usage.
    """

    prompt: str = "prompt_tokens"
    answer: str = "completion_tokens"
    details: str = "prompt_tokens_details"
    answer_details: str = "completion_tokens_details"
    cached: str = "cached_tokens"
    written: str = "created_cache_tokens"
    is_prompt_the_rest: bool = False
    needs_details: bool = False
    inside: str = ""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What is peculiar to an endpoint.

    Attributes:
        limit: The field that limits the tokens of an answer.
        left_out: Fields that a prefill node does not receive.
        inside: The field in which both are; empty: they are the body's own.
        always: Fields that all nodes receive, whatever the client has sent.
        any_tool: What a prefill node receives instead of `tool_choice` of the type `tool`. A server of vLLM
            refuses a message with a named call that the limit cuts off. Empty: it receives the client's.
        refused: Fields that the router cannot serve, and why.
        first_events: Events of a stream by name that are only its frame.
        last_events: One of these ends a stream. If empty, `[DONE]` does.
        usage: How an answer names the counts of tokens.
    """

    limit: str = "max_tokens"
    left_out: frozenset[str] = _LEFT_OUT
    inside: str = ""
    always: Mapping[str, Any] = field(default_factory=dict)
    any_tool: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    first_events: frozenset[str] = frozenset()
    last_events: frozenset[str] = frozenset()
    usage: UsageNames = UsageNames()


_KEPT = "the router keeps no responses: send all earlier items in 'input'"
_CHAT = Dialect()
_DIALECTS: Mapping[str, Dialect] = {
    # A grammar, which a server compiles. Some chat templates read it as well, but a prompt has no template.
    COMPLETIONS: Dialect(left_out=_LEFT_OUT | {"response_format"}),
    CHATS: _CHAT,
    RESPONSES: Dialect(
        "max_output_tokens",
        left_out=_LEFT_OUT | {"include"},
        always={"store": False},
        refused={
            "store": "the router keeps no responses: leave 'store' out, or send false",
            "previous_response_id": _KEPT,
            "conversation": _KEPT,
            "background": "the router keeps no responses: wait for the answer, or stream it",
            "truncation": "where a prompt is cut depends on its server's limits: shorten 'input' yourself",
        },
        first_events=frozenset({"response.created", "response.in_progress", "response.queued"}),
        last_events=frozenset({"response.completed", "response.incomplete", "response.failed", "error"}),
        usage=UsageNames(
            "input_tokens",
            "output_tokens",
            details="input_tokens_details",
            answer_details="output_tokens_details",
            written="cache_write_tokens",
            needs_details=True,
            inside="response",
        ),
    ),
    MESSAGES: Dialect(
        left_out=_LEFT_OUT | {"stop_sequences"},
        any_tool={"type": "any"},
        first_events=frozenset({"message_start", "ping"}),
        last_events=frozenset({"message_stop", "error"}),
        usage=UsageNames(
            "input_tokens",
            "output_tokens",
            details="",
            answer_details="",
            cached="cache_read_input_tokens",
            written="cache_creation_input_tokens",
            is_prompt_the_rest=True,
            inside="message",
        ),
    ),
    GENERATE: Dialect(
        left_out=_LEFT_OUT | {"flat_logprobs", "thinking_token_budget"},
        inside="sampling_params",
    ),
}
#: Values that ask for nothing.
_NOTHING: Mapping[str, tuple[object, ...]] = {"truncation": (None, "disabled")}


def dialect_of(path: str) -> Dialect:
    """Return the dialect of an endpoint; a chat's for a path that has none."""
    return _DIALECTS.get(path, _CHAT)


def check_refused(body: Mapping[str, Any], dialect: Dialect) -> None:
    """Refuse what would need a server that keeps responses, or that runs tools.

    Raises:
        ApiError: The request asks for that (400).
    """
    for name, why in dialect.refused.items():
        value = body.get(name)
        if value not in _NOTHING.get(name, (None, False)):
            raise bad_request(f"{name}={str(value)[:80]!r} cannot be served: {why}", name)
    tools = body.get("tools") if dialect.refused else None
    for tool in tools if isinstance(tools, list) else ():
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind.startswith(SERVER_TOOLS):
            message = (
                f"tools has {kind[:80]!r}, which the server runs itself in several turns, and each needs a handoff "
                "of its own: give the model a tool of type 'function', and run it yourself"
            )
            raise bad_request(message, "tools")


def error_events(path: str, error: ApiError, last: Event | None = None) -> list[Event]:
    """Return the events that end a stream of an endpoint with an error.

    Args:
        last: The last event that the client has.
    """
    if path == MESSAGES:
        return [Event.of(error.body(path), "error")]
    if path == RESPONSES:
        number = last.content.get("sequence_number") if last is not None else None
        number = number + 1 if type(number) is int else 0
        told = {"message": str(error), "code": error.code or error.kind, "param": error.param}
        return [Event.of({"type": "error", "sequence_number": number, **told}, "error")]
    return [Event(b"data: " + json.dumps(error.body()).encode() + b"\n\n"), DONE]
