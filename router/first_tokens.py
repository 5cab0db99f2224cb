"""The first token of an answer comes from the prefill node, and a decode node continues after it.

The prefill node samples this token anyway. Where it is provably a single node's first token, the router streams it at once, and
the transfer of the cache delays only the second one. This module decides where that is, and reads the token; what the decode node
gets is in `beginnings`. It does no I/O.

A reference node does most of this itself: see `node/first_token.py`. A server of vLLM is not asked for more than it gives, so
its answers are stitched: the prefill's only token becomes the first chunk, and the decode node gets prompt and token as one
prompt. `is_stitchable` says which requests allow that.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..connector.p2p.params import IDENTITY
from ..web.sse import Event, Filter
from .beginnings import (
    REPLACEMENT,
    Abilities,
    Beginning,
    OtherTokenError,
    ReferenceBeginning,
    StitchedBeginning,
    choice_of,
    dated,
    ids_in,
    is_determined,
    is_possible,
    is_stitchable,
)

#: A key of ours in `kv_transfer_params`, for reference nodes, and one of their answer.
WANT_FIRST_TOKEN = "want_first_token"
FIRST_TOKEN = "first_token"

#: Keys of a chunk about the whole stream.
_HEAD = frozenset({"id", "object", "created", "model"})


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
    def beginning(self) -> Beginning:
        """Return what the client has of the answer together with this token."""

    def removed(self) -> Filter:
        """Return what turns the stream of a decode node that has chosen all tokens itself into the client's.

        It takes this token out, which the client has, and raises `OtherTokenError` if the decode node has chosen another one.
        """
        return _Remover(self.events[0].content, self.created)


# -- asking ------------------------------------------------------------------------------------------


def is_single_token(body: Mapping[str, Any]) -> bool:
    """Whether an answer has one token at most."""
    return 1 in (body.get("max_tokens"), body.get("max_completion_tokens"))


def is_expected(body: Mapping[str, Any], path: str, decode_node: Abilities) -> bool:
    """Whether the client of a request will probably receive its first token from the prefill node.

    This is a guess from the request alone, because only the prefill node knows everything. It is for a router that has to choose
    between this and a decode request that leaves before the first token is known.
    """
    if not body.get("stream") or not is_possible(body):
        return False
    if decode_node.vllm_max_model_len:
        return bool(decode_node.continues_answers) and is_stitchable(body, path)
    return bool(decode_node.continues_answers) and is_determined(body)


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

    def beginning(self) -> Beginning:
        return ReferenceBeginning(self.created, self.model, [self.token_id])


def _are_chunks(chunks: list[Any], *, is_all: bool) -> bool:
    """Whether these are the chunks that a node streams with the first token of an answer, or with all of an answer of one."""
    if not chunks or not all(isinstance(chunk, dict) and "error" not in chunk for chunk in chunks):
        return False
    choice = choice_of(chunks[0])
    delta = choice.get("delta")
    text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
    if is_all:
        # A token that ends the answer need not have a text. The other chunk, if any, has the usage.
        return isinstance(choice.get("finish_reason"), str) and not any(map(choice_of, chunks[1:]))
    return isinstance(text, str) and bool(text) and not choice.get("finish_reason") and len(chunks) == 1


# -- vLLM --------------------------------------------------------------------------------------------


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
        token_ids, prompt = ids_in(choice.get("token_ids")), ids_in(choice.get("prompt_token_ids"))
        if len(token_ids) != 1 or not prompt or not isinstance(text := choice.get("text"), str):
            return None
        params = _mapping(answer, "kv_transfer_params")
        if params.get("remote_num_tokens", len(prompt)) != len(prompt):
            return None
        if not isinstance(model := params.get(IDENTITY), str) or not model:
            return None
        reason, max_tokens = choice.get("finish_reason"), int(body["max_tokens"])
        is_all = reason == "stop" or (reason == "length" and max_tokens == 1)
        if not is_all and (reason != "length" or not text or REPLACEMENT in text):
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

    def beginning(self) -> Beginning:
        *prompt, token_id = self.prompt
        text = str(choice_of(self.events[0].content).get("text") or "")
        return StitchedBeginning(self.created, self.model, tuple(prompt), self.max_tokens, [token_id], text)


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
            return [dated(event, self.created)]
        self.has_begun = True
        return [dated(rest, self.created) for rest in self._without_token(event)]

    def _without_token(self, event: Event) -> list[Event]:
        parsed = event.content
        if "error" in parsed:
            return [event]  # the load has failed
        choice, own = choice_of(parsed), choice_of(self.chunk)
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
