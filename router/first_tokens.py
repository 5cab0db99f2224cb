"""The first token of an answer comes from the prefill node, and a decode node continues after it.

The prefill node samples this token anyway. Where it is provably a single node's first token, the router streams it at once, and
the transfer of the cache delays only the second one. This module decides where that is, and writes the pieces. It does no I/O.

A reference node does most of this itself: see `node/first_token.py`. A server of vLLM is not asked for more than it gives, so
its answers are stitched: the prefill's only token becomes the first chunk, and the decode node gets prompt and token as one
prompt. Only the fields of a request in `_STITCHABLE` allow that.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..connector.p2p.params import FIRST_TOKEN, IDENTITY
from ..web.sse import Event, Filter

#: A key of ours in `kv_transfer_params`, for reference nodes.
WANT_FIRST_TOKEN = "want_first_token"
COMPLETIONS = "/v1/completions"

#: Keys of a chunk about the whole stream.
_HEAD = frozenset({"id", "object", "created", "model"})
_REPLACEMENT = "\ufffd"
_CREATED = re.compile(rb'("created":\s*)\d+')


@dataclass(frozen=True)
class Abilities:
    """What a node can do with a first token.

    Attributes:
        continues_answers: It takes the key `first_token` from nodes with this digest of their model: they would have chosen the
            same token for the same request. Empty: it takes it from none.
        vllm_max_model_len: The longest sequence of a vLLM server, prompt and answer together. 0: it is none.
    """

    continues_answers: str = ""
    vllm_max_model_len: int = 0


class FirstToken(ABC):
    """The first token of an answer.

    Attributes:
        created: Of all parts of the answer.
        events: The events of a stream so far.
        is_all: The answer ends with this token, so that no decode node is needed.
        whole: The whole answer, if it is not a stream and ends with this token; otherwise None.
    """

    created: int
    events: tuple[Event, ...]
    is_all: bool
    whole: Mapping[str, Any] | None = None

    @abstractmethod
    def can_continue_at(self, node: Abilities) -> bool:
        """Whether a decode node can continue the answer."""

    @abstractmethod
    def decode_body(
        self, body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return the body for the decode node.

        Args:
            body: The client's.
            kv_transfer_params: The offer; None if there is none.
        """

    def continued(self) -> Filter:
        """Return what turns the stream of a decode node that continues after this token into the client's."""
        return lambda event: [event]

    def removed(self) -> Filter:
        """Return what does so with the stream of a decode node that has chosen all tokens itself.

        It takes this token out, which the client has, and raises `OtherTokenError` if the decode node has chosen another one.
        """
        return _Remover(self.events[0].content, self.created)


class OtherTokenError(Exception):
    """A decode node has begun its answer otherwise than the prefill node, from which the client has the first token."""


# -- asking ------------------------------------------------------------------------------------------


def is_possible(body: Mapping[str, Any]) -> bool:
    """Whether a prefill node of any kind may be asked for the first token of a request's answer.

    The prefill node does not receive the fields about several answers and the least length, so it could not respect them.
    """
    return all(body.get(name) in allowed for name, allowed in _DECODE_ONLY.items())


def is_single_token(body: Mapping[str, Any]) -> bool:
    """Whether an answer has one token at most."""
    return 1 in (body.get("max_tokens"), body.get("max_completion_tokens"))


_DECODE_ONLY: Mapping[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "min_tokens": (None, 0),
}


def is_expected(body: Mapping[str, Any], path: str, decode_node: Abilities) -> bool:
    """Whether the client of a request will probably receive its first token from the prefill node.

    This is a guess from the request alone, because only the prefill node knows everything. It is for a router that has to choose
    between this and a decode request that leaves before the first token is known.
    """
    if not body.get("stream") or not is_possible(body):
        return False
    if decode_node.vllm_max_model_len:
        return bool(decode_node.continues_answers) and is_stitchable(body, path)
    is_determined = body.get("temperature") == 0 or body.get("seed") is not None
    scores = body.get("logprobs")  # 0 asks for the token's own
    asks_for_scores = (scores is not None and scores is not False) or bool(body.get("return_top_logits"))
    is_known = bool(decode_node.continues_answers)
    return is_known and is_determined and not asks_for_scores and not body.get("echo")


def wish_for(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `kv_transfer_params` of a request to a prefill node contain besides the wish for an offer."""
    max_tokens = body.get("max_completion_tokens")
    options = body.get("stream_options") or {}
    wish = {
        "max_tokens": body.get("max_tokens") if max_tokens is None else max_tokens,
        "include_usage": bool(body.get("stream")) and options.get("include_usage") is True,
    }
    return {WANT_FIRST_TOKEN: wish}


def first_token_of(body: Mapping[str, Any], path: str, answer: Mapping[str, Any]) -> FirstToken | None:
    """Read the first token from a prefill node's answer.

    Args:
        body: The client's request.
        path: Where the client sent it.

    Returns:
        None if the answer has none, or the decode node must choose the token itself.
    """
    passed = answer.get(FIRST_TOKEN)
    if isinstance(passed, dict):
        return PassedToken.of(body, answer, passed)
    return StitchedToken.of(body, answer) if is_stitchable(body, path) else None


# -- reference nodes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class PassedToken(FirstToken):
    """A token from a reference node, which has written the events itself.

    Attributes:
        model: Digest of the prefill node's model, tokenizer and so on. A node with another one makes other tokens of the same
            request, so it must choose the first one itself.
    """

    token_id: int
    created: int
    model: str
    events: tuple[Event, ...]
    is_all: bool
    whole: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls, body: Mapping[str, Any], answer: Mapping[str, Any], passed: Mapping[str, Any]
    ) -> PassedToken | None:
        """Read a reference node's answer.

        Returns:
            None if its field is malformed. Nor if the token has no text of its own, such as a part of a character: the client would
            see nothing of it yet, and could not tell it from a node that has left the text out.
        """
        token_id, created, chunks = passed.get("token_id"), passed.get("created"), passed.get("chunks")
        if type(token_id) is not int or type(created) is not int:
            return None
        is_all = passed.get("is_all") is True
        if not isinstance(chunks, list) or not _are_chunks(chunks, is_all=is_all):
            return None
        whole = None
        if is_all and not body.get("stream"):
            if answer.get("object") not in ("text_completion", "chat.completion"):
                return None  # the last event of a stream
            whole = {key: value for key, value in answer.items() if key != FIRST_TOKEN}
            whole["kv_transfer_params"] = None  # the router releases the offer
        events = tuple(Event(b"data: " + json.dumps(chunk).encode() + b"\n\n") for chunk in chunks)
        model = str(passed.get("model") or "")
        return cls(token_id, created, model, events, is_all, whole)

    def can_continue_at(self, node: Abilities) -> bool:
        return bool(self.model) and node.continues_answers == self.model

    def decode_body(
        self, body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        known = {"token_id": self.token_id, "created": self.created, "model": self.model}
        return {**body, "kv_transfer_params": {**(kv_transfer_params or {}), FIRST_TOKEN: known}}


def _are_chunks(chunks: list[Any], *, is_all: bool) -> bool:
    """Whether these are the chunks that a node streams with the first token of an answer, or with all of an answer of one."""
    if not chunks or not all(isinstance(chunk, dict) and "error" not in chunk for chunk in chunks):
        return False
    choice = _choice(chunks[0])
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    if is_all:
        # A token that ends the answer need not have a text. The other chunk, if any, has the usage.
        return isinstance(choice.get("finish_reason"), str) and not any(map(_choice, chunks[1:]))
    return isinstance(text, str) and bool(text) and not choice.get("finish_reason") and len(chunks) == 1


# -- vLLM --------------------------------------------------------------------------------------------


def _is_nothing(value: object) -> bool:
    return value is None or value is False or value in (0, "", [], {})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _only_asks_for_usage(value: object) -> bool:
    return value is None or (isinstance(value, dict) and value.keys() <= {"include_usage"})


#: The fields of a request whose answer can be stitched, and which of their values. Everything else may change the second token
#: by what was sampled before it, or asks for something that a chunk of one token does not contain.
_STITCHABLE: Mapping[str, Callable[[object], bool]] = {
    "model": lambda value: True,
    "prompt": lambda value: True,
    "user": lambda value: True,
    "cache_salt": lambda value: True,
    "priority": lambda value: True,
    # Greedy only: vLLM draws from a generator per request, which the decode node would start anew.
    "temperature": lambda value: _is_number(value) and value == 0,
    "seed": lambda value: True,
    # None of these changes which token is the likeliest.
    "top_p": lambda value: True,
    "top_k": lambda value: True,
    "min_p": lambda value: True,
    # This one counts the tokens of prompt and answer alike.
    "repetition_penalty": lambda value: True,
    "logit_bias": lambda value: True,
    "ignore_eos": lambda value: True,
    "stop_token_ids": lambda value: True,
    "max_tokens": lambda value: type(value) is int and value >= 1,
    "stream": lambda value: value is True,
    "stream_options": _only_asks_for_usage,
    "logprobs": lambda value: value is None,  # 0 asks for the token's own
    "prompt_logprobs": lambda value: value is None,
    "n": lambda value: value in (None, 1),
    "best_of": lambda value: value in (None, 1),
    **dict.fromkeys(
        (
            "echo",
            "presence_penalty",
            "frequency_penalty",
            "stop",
            "suffix",
            "min_tokens",
            "use_beam_search",
            "return_token_ids",
            "kv_transfer_params",
        ),
        _is_nothing,
    ),
}
_NEEDED = frozenset({"temperature", "max_tokens", "stream"})


def is_stitchable(body: Mapping[str, Any], path: str) -> bool:
    """Whether a request to servers of vLLM can be answered in two parts that are those of one server."""
    return (
        path == COMPLETIONS
        and body.keys() >= _NEEDED
        and all(name in _STITCHABLE and _STITCHABLE[name](value) for name, value in body.items())
    )


@dataclass(frozen=True)
class StitchedToken(FirstToken):
    """A token from a server of vLLM.

    Attributes:
        prompt: The token ids of the prompt, and this token.
        max_tokens: Length limit of the whole answer.
        model: Identity of the server that chose the token.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    model: str
    created: int
    events: tuple[Event, ...]
    is_all: bool

    @classmethod
    def of(cls, body: Mapping[str, Any], answer: Mapping[str, Any]) -> StitchedToken | None:
        """Read the answer of a prefill of one token, of a request that `is_stitchable`.

        Returns:
            None if the server does not say which model has chosen the token. Nor if a server would not send a chunk with it, or only with a text that later tokens decide: part of a
            character, or a token without text. Nor if the token does not follow the whole prompt: a server whose model has
            recurrent states leaves out the prompt's last token.
        """
        choices, created = answer.get("choices"), answer.get("created")
        if not isinstance(choices, list) or len(choices) != 1 or type(created) is not int:
            return None
        choice = choices[0] if isinstance(choices[0], dict) else {}
        token_ids, prompt = _ids(choice.get("token_ids")), _ids(choice.get("prompt_token_ids"))
        if len(token_ids) != 1 or not prompt or not isinstance(text := choice.get("text"), str):
            return None
        params = _mapping(answer, "kv_transfer_params")
        if params.get("remote_num_tokens", len(prompt)) != len(prompt):
            return None
        if not isinstance(model := params.get(IDENTITY), str) or not model:
            return None
        reason, max_tokens = choice.get("finish_reason"), int(body["max_tokens"])
        is_all = reason == "stop" or (reason == "length" and max_tokens == 1)
        if not is_all and (reason != "length" or not text or _REPLACEMENT in text):
            return None
        asks_for_usage = (body.get("stream_options") or {}).get("include_usage") is True
        # The last event of a stream says which build of vLLM it is.
        build = answer.get("system_fingerprint") if is_all else None
        last = {} if build is None else {"system_fingerprint": build}
        chunk = _chunk(answer, choice, text, is_all=is_all)
        if not is_all or not asks_for_usage:
            events = [Event.of(chunk | last)]
        else:
            usage = {key: count for key, count in _mapping(answer, "usage").items() if count is not None}
            events = [Event.of(chunk), Event.of({**_head(answer), "choices": [], "usage": usage, **last})]
        return cls((*prompt, *token_ids), max_tokens, model, created, tuple(events), is_all)

    def can_continue_at(self, node: Abilities) -> bool:
        if node.continues_answers != self.model:
            return False
        # A server refuses a request whose prompt and `max_tokens` are longer than this, which must not happen half-way.
        return len(self.prompt) - 1 + self.max_tokens <= node.vllm_max_model_len

    def decode_body(
        self, body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        others = {key: value for key, value in body.items() if key != "kv_transfer_params"}
        # The server compares the identity with its own once more: it may have changed since it was asked.
        params = {**(kv_transfer_params or {}), FIRST_TOKEN: {"model": self.model}}
        return {
            **others,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens - 1,
            "kv_transfer_params": params,
        }

    def continued(self) -> Filter:
        return _Rewriter(self.created)


@dataclass
class _Rewriter:
    """Turns the stream of a server that continued an answer into that of a server that gave all of it.

    Attributes:
        created: Of the first chunk.
    """

    created: int

    def __call__(self, event: Event) -> list[Event]:
        event = _dated(event, self.created)
        usage = event.content.get("usage") if b'"usage":{' in event.raw else None
        if not isinstance(usage, dict):
            return [event]
        # Its prompt ends with the answer's first token.
        for name, change in (("prompt_tokens", -1), ("completion_tokens", 1)):
            if isinstance(count := usage.get(name), int):
                usage[name] = count + change
        return [Event.of(event.content)]


@dataclass
class _Remover:
    """Takes the first token out of the stream of a decode node that has chosen it too.

    What is left is the decode node's own answer, so only the texts have to agree, not the ids.

    Attributes:
        chunk: What the client has.
        created: Of this chunk.
    """

    chunk: Mapping[str, Any]
    created: int
    has_begun: bool = False

    def __call__(self, event: Event) -> list[Event]:
        if self.has_begun:
            return [_dated(event, self.created)]
        self.has_begun = True
        return [_dated(rest, self.created) for rest in self._without_token(event)]

    def _without_token(self, event: Event) -> list[Event]:
        parsed = event.content
        if "error" in parsed:
            return [event]  # the load has failed
        choice, own = _choice(parsed), _choice(self.chunk)
        # Versions of vLLM differ in the keys of a chunk. One without a value says nothing that the client does not know.
        is_known = all(choice.get(key) == value for key, value in own.items())
        has_more = any(parsed[key] is not None for key in parsed.keys() - self.chunk.keys() - _HEAD) or any(
            choice[key] is not None for key in choice.keys() - own.keys()
        )
        if own and is_known and not has_more:
            return []
        # A busy vLLM puts several tokens into one event.
        text, begin = choice.get("text"), own.get("text")
        if isinstance(text, str) and begin and text.startswith(begin) and not choice.get("token_ids"):
            return [Event.of({**parsed, "choices": [{**choice, "text": text[len(begin) :]}]})]
        raise OtherTokenError


def _dated(event: Event, created: int) -> Event:
    """Return an event with another time. A stream has one; text follows after it, so the first match is the field."""
    return Event(_CREATED.sub(rb"\g<1>%d" % created, event.raw, count=1))


def _choice(chunk: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the only choice of a chunk; empty if it has another number of them."""
    match chunk.get("choices"):
        case [dict() as choice]:
            return choice
    return {}


def _chunk(
    answer: Mapping[str, Any], choice: Mapping[str, Any], text: str, *, is_all: bool
) -> dict[str, Any]:
    """Return the chunk that a server streams with the only token of a prefill."""
    piece = {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": choice.get("finish_reason") if is_all else None,
        "stop_reason": choice.get("stop_reason") if is_all else None,
        "prompt_token_ids": None,
        "token_ids": None,
    }
    return {**_head(answer), "choices": [piece]}


def _head(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": answer.get("id"),
        "object": "text_completion",
        "created": answer.get("created"),
        "model": answer.get("model"),
    }


def _mapping(answer: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = answer.get(name)
    return value if isinstance(value, dict) else {}


def _ids(value: object) -> tuple[int, ...]:
    """Return a list of token ids; empty if it is something else."""
    return tuple(value) if isinstance(value, list) and all(type(one) is int for one in value) else ()
