"""Read the JSON bodies of OpenAI's API into frozen types.

The list of fields is closed. A field is served (`router/http/api_pages.py` lists these), or it cannot change
an answer, or it is refused unless its value asks for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...connector.p2p.params import CONTINUES, MOVE_AS
from ...router.http.api_pages import fields_of
from ...router.http.errors import bad_request
from ...router.http.json_body import Fields, refuse_stream_options_alone
from ..engine.types import MAX_LOGPROBS, SamplingParams

#: OpenAI's default for completions. A chat's answer may be as long as the context allows.
DEFAULT_COMPLETION_TOKENS = 16
UNLIMITED_TOKENS = 1 << 30
MAX_STOP_TEXTS = 16
#: Most answers to one request: its prompts times `n`.
MAX_ANSWERS = 256

#: Fields that are accepted with any value, because they cannot change an answer. `docs/openai-api.md` names
#: them.
WITHOUT_EFFECT = frozenset(
    {
        *(
            "user",
            "safety_identifier",
            "metadata",
            "store",
            "service_tier",
            "priority",
            "request_id",
            "session_id",
        ),
        *("prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    }
)
STREAM_OPTIONS_WITHOUT_EFFECT = frozenset({"continuous_usage_stats", "include_obfuscation"})
#: Fields that are not served, and the values that change nothing. `min_tokens` may also be 1 in a request for
#: a prefill, where vllm-router writes it. Every other field that is not served may only be null, false or
#: empty.
ONLY_VALUES: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "typical_p": (1,),
    "length_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_reasoning": (True,),
    "separate_reasoning": (True, False),
    "stream_reasoning": (True, False),
    "mm_payload": ("tensors",),
    "routed_experts_prompt_start": (0,),
    "stream_interval": (1,),
}
#: The same for one of the two endpoints only.
ONLY_VALUES_OF_COMPLETIONS: Mapping[str, tuple[object, ...]] = {
    "top_logprobs": (0,),
    "add_special_tokens": (True,),
}
ONLY_VALUES_OF_CHATS: Mapping[str, tuple[object, ...]] = {
    "add_special_tokens": (False,),
    "add_generation_prompt": (True,),
}
#: What messages may have besides role and content, for the history of a chat with tools, and its type.
FIELDS_OF_MESSAGES: Mapping[str, type] = {"name": str, "tool_call_id": str, "tool_calls": list}
#: The values of all others that ask for nothing.
_NOTHING: tuple[object, ...] = (False, "", [], {})

#: What a client can do instead, for the messages about some of these fields.
ALTERNATIVES: Mapping[str, str] = {
    "best_of": ": ask for n answers, and choose",
    "top_logprobs": ": completions have 'logprobs'",
}


@dataclass(frozen=True)
class Message:
    """One turn of a chat.

    Attributes:
        content: Empty if a turn of the assistant only calls tools.
        more: What else the model's template may read of it: `FIELDS_OF_MESSAGES`.
    """

    role: str
    content: str
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChatPrompt:
    """The messages of a chat, which the model's template turns into a text."""

    messages: tuple[Message, ...]


Prompt = str | tuple[int, ...] | ChatPrompt


@dataclass(frozen=True)
class KnownAnswer:
    """The beginning of an answer, as other nodes chose it. They were lost in the middle of it, or drain.

    A router sends it in `kv_transfer_params` as `continues`, a key that connectors ignore:
    `{"token_ids": [...], "created": ..., "model": ...}`. The answer is then that of a single node. Its stream
    begins after these tokens, and everything else counts and contains them. A node with another digest
    refuses (503): it may have been restarted with another model since the router asked.

    With `"move_as": NAME` the router can have the answer moved. It sends `{"move": NAME}`, and the answer
    stops after its next token with the `finish_reason` `"moved"` and the params of an offer of its cache.

    Attributes:
        token_ids: Empty: the answer begins here.
        created: Seconds since 1970, for all parts of the answer. None: it begins here.
        model: Digest of the nodes that chose it. Empty: the router does not say.
        move_as: The name by which the answer can be moved. Empty: it cannot be.
    """

    token_ids: tuple[int, ...]
    created: int | None
    model: str = ""
    move_as: str = ""


@dataclass(frozen=True)
class ClientRequest:
    """A request's body, checked as far as possible without the model.

    Attributes:
        model: The model's name as the client wrote it; empty means the model that is served.
        prompts: Each a text, token ids, or a chat.
        num_answers: Answers to each prompt.
        include_usage: Whether a stream ends with a chunk that has the usage.
        return_token_ids: Whether answers have `token_ids` in addition to the text, and whole ones
            `prompt_token_ids`.
        return_tokens_as_token_ids: Whether log probabilities name tokens by their ids, which are unique, and
            not by their texts.
        cache_salt: The request shares the prefix cache only with requests that have the same salt; empty for
            no salt.
        known: The beginning of the answer, after which this node continues. None: it begins here.
    """

    model: str
    prompts: tuple[Prompt, ...]
    num_answers: int
    sampling: SamplingParams
    stream: bool
    include_usage: bool
    return_token_ids: bool
    return_tokens_as_token_ids: bool
    kv_transfer_params: Mapping[str, Any] | None
    cache_salt: str
    known: KnownAnswer | None = None


def parse_completion(body: Mapping[str, Any]) -> ClientRequest:
    """Read the body of `/v1/completions`.

    Raises:
        ApiError: a field is missing, malformed or not supported (400, naming it).
        InvalidRequestError: a sampling parameter is outside its range.
    """
    if "prompt" not in body:
        raise bad_request("the request lacks 'prompt'", "prompt")
    _refuse_unsupported(body, "/v1/completions", ONLY_VALUES_OF_COMPLETIONS)
    fields = Fields(body)
    # Some clients write false for an absent number.
    num_logprobs = None if body.get("logprobs") is False else fields.optional_integer("logprobs")
    return _client_request(body, _prompts(body["prompt"]), DEFAULT_COMPLETION_TOKENS, num_logprobs)


def parse_chat(body: Mapping[str, Any]) -> ClientRequest:
    """Read the body of `/v1/chat/completions`.

    Raises:
        ApiError: a field is missing, malformed or not supported (400, naming it).
        InvalidRequestError: a sampling parameter is outside its range.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise bad_request("'messages' must be a list of at least one message", "messages")
    chat = ChatPrompt(tuple(_message(index, message) for index, message in enumerate(messages)))
    _refuse_unsupported(body, "/v1/chat/completions", ONLY_VALUES_OF_CHATS)
    fields = Fields(body)
    num_top = fields.integer("top_logprobs", 0)
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise bad_request(f"top_logprobs={num_top}: it must be between 0 and {MAX_LOGPROBS}", "top_logprobs")
    wants_logprobs = fields.boolean("logprobs", False)
    if num_top and not wants_logprobs:
        raise bad_request("top_logprobs needs 'logprobs': true", "top_logprobs")
    return _client_request(body, (chat,), UNLIMITED_TOKENS, num_top if wants_logprobs else None)


def _client_request(
    body: Mapping[str, Any],
    prompts: tuple[Prompt, ...],
    default_max_tokens: int,
    num_logprobs: int | None,
) -> ClientRequest:
    fields = Fields(body)
    max_tokens = fields.integer("max_tokens", default_max_tokens)
    max_tokens = fields.integer("max_completion_tokens", max_tokens)
    kv_transfer_params, known = _take_known_answer(fields.optional_mapping("kv_transfer_params"))
    num_answers = fields.integer("n", 1)
    if num_answers < 1:
        raise bad_request(f"n={num_answers}: it must be at least 1", "n")
    if num_answers * len(prompts) > MAX_ANSWERS:
        what = f"n={num_answers}" if len(prompts) == 1 else f"n={num_answers} with {len(prompts)} prompts"
        raise bad_request(
            f"{what}: at most {MAX_ANSWERS} answers per request are possible",
            "n" if num_answers > 1 else "prompt",
        )
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 1.0),
        top_p=fields.number("top_p", 1.0),
        seed=fields.optional_integer("seed"),
        stop=_stop(body.get("stop")),
        ignore_eos=fields.boolean("ignore_eos", False),
        num_logprobs=num_logprobs,
    )
    if kv_transfer_params and len(prompts) > 1:
        raise bad_request(
            f"kv_transfer_params are for one prompt, and the request has {len(prompts)}: send one request per prompt",
            "kv_transfer_params",
        )
    if num_answers > 1 and (kv_transfer_params or {}).get("do_remote_decode"):
        raise bad_request(
            f"n={num_answers}: with do_remote_decode it must be 1, because a node loads a prompt once", "n"
        )
    if (
        known is not None
        and known.token_ids
        # Only the node that computes a token has its log probability.
        and (num_answers * len(prompts) > 1 or num_logprobs is not None)
    ):
        raise bad_request(
            "kv_transfer_params.continues needs one answer to one prompt, and no log probabilities: leave it out",
            "kv_transfer_params",
        )
    # As vLLM does. A client that sends an empty salt by mistake would share cached prompts without knowing
    # it.
    if body.get("cache_salt") == "":
        raise bad_request(
            "'cache_salt' must not be empty: leave it out to share cached prompts", "cache_salt"
        )
    return ClientRequest(
        model=fields.text("model", ""),
        prompts=prompts,
        num_answers=num_answers,
        sampling=sampling,
        stream=fields.boolean("stream", False),
        include_usage=Fields(fields.mapping("stream_options")).boolean("include_usage", False),
        return_token_ids=fields.boolean("return_token_ids", False),
        return_tokens_as_token_ids=fields.boolean("return_tokens_as_token_ids", False),
        kv_transfer_params=kv_transfer_params,
        cache_salt=fields.text("cache_salt", ""),
        known=known,
    )


def _take_known_answer(
    params: Mapping[str, Any] | None,
) -> tuple[Mapping[str, Any] | None, KnownAnswer | None]:
    """Take what is known of the answer out of `kv_transfer_params`.

    Returns:
        The other params, and what a decode node is given.

    Raises:
        ApiError: A value has the wrong type (400).
    """
    if params is None or CONTINUES not in params:
        return params, None
    others = {key: value for key, value in params.items() if key != CONTINUES}
    if (given := Fields(params).optional_mapping(CONTINUES)) is None:
        return others, None
    inner = Fields(given)
    token_ids = given.get("token_ids") or []
    if not isinstance(token_ids, list) or not all(type(each) is int for each in token_ids):
        raise bad_request("'continues.token_ids' must be a list of integers", "kv_transfer_params")
    created, model = inner.optional_integer("created"), inner.text("model", "")
    return others, KnownAnswer(tuple(token_ids), created, model, inner.text(MOVE_AS, ""))


def _refuse_unsupported(body: Mapping[str, Any], path: str, more: Mapping[str, tuple[object, ...]]) -> None:
    served = fields_of(path)
    for name, value in body.items():
        is_for_prefill = name == "min_tokens" and value == 1 and _is_prefill(body)
        if name not in served and name not in WITHOUT_EFFECT and not is_for_prefill:
            _require_nothing(name, name, value, more.get(name) or ONLY_VALUES.get(name))
    refuse_stream_options_alone(body)
    for name, value in Fields(body).mapping("stream_options").items():
        if name not in {"include_usage", *STREAM_OPTIONS_WITHOUT_EFFECT}:
            _require_nothing(f"stream_options.{name}", "stream_options", value)


def _require_nothing(name: str, param: str, value: object, allowed: tuple[object, ...] | None = None) -> None:
    """Refuse a field that is not served, unless its value is one of these, or asks for nothing."""
    if value is None or any(_same(value, only) for only in allowed or _NOTHING):
        return
    hint = f"; only {' or '.join(json.dumps(only) for only in allowed)} is" if allowed else ""
    alternative = ALTERNATIVES.get(name, ": leave it out")
    raise bad_request(
        f"{name}={json.dumps(value)[:80]} is not supported{hint}{alternative}", param, "unsupported_value"
    )


def _is_prefill(body: Mapping[str, Any]) -> bool:
    """Whether this is a router's request for a prefill.

    Its only token goes to no client, so it does not matter which it is.
    """
    params = body.get("kv_transfer_params")
    return body.get("max_tokens") == 1 and isinstance(params, dict) and params.get("do_remote_decode") is True


def _same(value: object, other: object) -> bool:
    # In Python `True == 1`, but `"n": true` is wrong.
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _prompts(value: object) -> tuple[Prompt, ...]:
    if isinstance(value, list) and {type(item) for item in value} in ({str}, {list}):
        return tuple(map(_prompt, value))
    return (_prompt(value),)


def _prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return tuple(value)
    raise bad_request(
        "'prompt' must be a string or a list of at least one token id, or a list of such prompts of one kind",
        "prompt",
    )


def _message(index: int, message: object) -> Message:
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        raise bad_request(f"{where} must be an object with 'role' and 'content'", "messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise bad_request(f"{where}.role must be a string that is not empty", "messages")
    more: dict[str, Any] = {}
    for name, value in message.items():
        if (kind := FIELDS_OF_MESSAGES.get(name)) is not None and value:
            if not isinstance(value, kind):
                raise bad_request(f"{where}.{name} must be a {_KINDS[kind]}", "messages")
            more[name] = value
        elif name not in ("role", "content"):
            _require_nothing(f"{where}.{name}", "messages", value)
    content = message.get("content")
    if content is None and "tool_calls" in more:
        return Message(role, "", more)
    return Message(role, _content(where, content), more)


_KINDS: Mapping[type, str] = {str: "string", list: "list of calls"}


def _content(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [part.get("text") for part in content if part.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(texts)
    raise bad_request(f"{where}.content must be a string or a list of text parts", "messages")


def _stop(value: object) -> tuple[str, ...]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise bad_request("'stop' must be a string or a list of strings, none of them empty", "stop")
    if len(texts) > MAX_STOP_TEXTS:
        raise bad_request(f"'stop' has {len(texts)} strings: at most {MAX_STOP_TEXTS} are supported", "stop")
    return tuple(texts)
