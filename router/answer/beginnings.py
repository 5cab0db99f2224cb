"""What the client has of an answer, so that another node can go on with it.

Comes in: the events of a decode node's stream with the ids of their tokens. Goes out: the
request to a decode node that goes on after them, and what turns its stream into the rest of the client's.
Does no I/O.

What must never break: no token is repeated, left out, or chosen by another model. Only answers are followed
whose next token depends on nothing but the model and the tokens so far.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...connector.p2p.params import CONTINUES, MOVE_AS
from ..http.endpoints import CHATS, COMPLETIONS
from ..http.sse import Event, Filter
from ..nodes.states import Abilities
from .bill import count_of

#: The endpoints with answers that another node can go on with.
FOLLOWED_PATHS = frozenset({COMPLETIONS, CHATS})
REPLACEMENT = "\ufffd"
_CREATED = re.compile(rb'("created":\s*)\d+')
#: In a text the quotes would be escaped, so these are keys.
TOKEN_IDS = re.compile(rb'(,\s*)?"token_ids":\s*\[([\d,\s]*)\]')
_PROMPT_TOKEN_IDS = re.compile(rb'"prompt_token_ids":\s*\[[\d,\s]*\]')


class OtherTokenError(Exception):
    """A node chose other tokens than another one whose tokens the client has: two logits were almost
    equal.
    """


class Beginning(ABC):
    """The tokens of an answer that the client has.

    Attributes:
        created: Of all parts of the answer.
    """

    created: int
    #: Where a node is asked to go on; None: where the client has asked.
    path: str | None = None

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """How many tokens another node is told."""

    @property
    def is_told_whole(self) -> bool:
        """Whether another node is told every token that has arrived."""
        return True

    @abstractmethod
    def can_continue_at(self, node: Abilities) -> bool:
        """Whether a decode node can go on with the answer."""

    @abstractmethod
    def decode_body(
        self, body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return the body for that decode node.

        Args:
            body: The client's.
            kv_transfer_params: The offer; None if there is none.
        """

    @abstractmethod
    def continued(self) -> Filter:
        """Return what turns that node's stream into the rest of the client's.

        It raises `OtherTokenError` if the node begins otherwise than the one before had gone on.
        """

    @abstractmethod
    def add(self, token_ids: Sequence[int], event: Event) -> None:
        """Take in an event of a node's stream, with the ids of its tokens."""

    @abstractmethod
    def usage(self) -> Mapping[str, int] | None:
        """Return the counts of tokens so far. None: the node has not said how many the prompt has."""


# -- which answers ---------------------------------------------------------------------------------


#: The values of fields that a reference node's answer may have if another node is to go on with it.
_OF_REFERENCE: Mapping[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "min_tokens": (None, 0),
}


def _is_nothing(value: object) -> bool:
    return value is None or value is False or value in (0, "", [], {})


def _only_asks_for_usage(value: object) -> bool:
    return value is None or (isinstance(value, dict) and value.keys() <= {"include_usage"})


#: The fields of a request to a server of vLLM whose stream another one can go on with, and which of their
#: values. Everything else may change a token by what was sampled before it, or asks for something that a part
#: of a stream does not contain.
_FOLLOWED: Mapping[str, Callable[[object], bool]] = {
    "model": lambda value: True,
    "prompt": lambda value: True,
    "user": lambda value: True,
    "cache_salt": lambda value: True,
    "priority": lambda value: True,
    # A token that is drawn by chance may be drawn anywhere. With a seed a server would start its generator
    # anew.
    "temperature": lambda value: value is None or type(value) in (int, float),
    "seed": lambda value: value is None,
    # None of these depends on the tokens before.
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
#: The same for chats. Other fields may change more than the prompt and the choice of tokens, such as a parser
#: of the answer.
_FOLLOWED_CHAT: Mapping[str, Callable[[object], bool]] = {
    **{name: holds for name, holds in _FOLLOWED.items() if name not in ("prompt", "suffix", "best_of")},
    **dict.fromkeys(("messages", "chat_template", "chat_template_kwargs"), lambda value: True),
    "max_tokens": lambda value: value is None or type(value) is int,
    "max_completion_tokens": lambda value: value is None or type(value) is int,
    "response_format": lambda value: value is None or value == {"type": "text"},
    "tool_choice": lambda value: value in (None, "none"),
    **dict.fromkeys(("tools", "logprobs", "top_logprobs"), _is_nothing),
}
#: Of these, what decides how a server continues a prompt of tokens.
_SAMPLING = (
    *("model", "user", "cache_salt", "priority", "stream", "stream_options", "ignore_eos", "stop_token_ids"),
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias"),
)


def is_followed(body: Mapping[str, Any], path: str, node: Abilities) -> bool:
    """Whether another node could go on with a decode node's stream if the node is lost.

    A server of vLLM begins a request anew: its counts of tokens, its grammar and its generator of random
    numbers know nothing of the answer so far. So its answer must depend on nothing but the tokens so far. A
    reference node is told them.
    """
    if path not in FOLLOWED_PATHS or not body.get("stream") or not node.continues_answers:
        return False
    if not node.vllm_max_model_len:
        is_one = all(body.get(name) in allowed for name, allowed in _OF_REFERENCE.items())
        scores = body.get("logprobs")  # 0 asks for the token's own
        return is_one and (scores is None or scores is False)
    if body.get("model") is not None and body["model"] not in node.vllm_models:
        return False  # an adapter's; the node's identity does not include it
    followed = _FOLLOWED if path == COMPLETIONS else _FOLLOWED_CHAT
    has_limit = path != COMPLETIONS or type(body.get("max_tokens")) is int
    return has_limit and all(name in followed and followed[name](value) for name, value in body.items())


def followed_body(body: Mapping[str, Any], node: Abilities, move_as: str) -> dict[str, Any]:
    """Return a decode request whose stream has the ids of its tokens.

    Args:
        node: As it has described itself. If it was restarted with another model since then, it refuses the
            request.
        move_as: The name by which the node can be asked to stop the answer for another node.
    """
    params = body.get("kv_transfer_params") or {}
    known = {"model": node.continues_answers, **(params.get(CONTINUES) or {}), MOVE_AS: move_as}
    return {**body, "return_token_ids": True, "kv_transfer_params": {**params, CONTINUES: known}}


def beginning_of(body: Mapping[str, Any], path: str, node: Abilities, event: Event) -> Beginning | None:
    """Return what the client has before the first event of a stream: no token.

    None if the answer cannot be followed.
    """
    head = event.content
    created = head.get("created")
    if not is_followed(body, path, node) or type(created) is not int:
        return None
    if not node.vllm_max_model_len:
        return ReferenceBeginning(created, node.continues_answers)
    prompt = ids_in(choice_of(head).get("prompt_token_ids")) or ids_in(head.get("prompt_token_ids"))
    if not prompt:
        return None
    chat = {} if path == COMPLETIONS else {key: head.get(key) for key in ("id", "object", "created", "model")}
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    # Each server begins to count anew, so the whole answer gets the limit that the first one would have kept.
    limits = (int(limit or node.vllm_default_max_tokens), node.vllm_most_tokens)
    max_tokens = min((node.vllm_max_model_len - len(prompt), *filter(None, limits)))
    return StitchedBeginning(created, node.continues_answers, prompt, max_tokens, chat=chat)


def take_token_ids(event: Event, *, keep: bool = False) -> tuple[Event | None, tuple[int, ...]]:
    """Take the ids of its tokens out of an event, for which the client has not asked.

    Args:
        keep: The client has asked for them.

    Returns:
        The event for the client, and the ids. None: without the ids there would have been no event.
    """
    if (found := TOKEN_IDS.search(event.raw)) is None:
        has_prompt = not keep and b'"prompt_token_ids":[' in event.raw
        return (_without_prompt(event.raw) if has_prompt else event), ()
    token_ids = tuple(int(each) for each in found[2].split(b",") if each.strip())
    if keep:
        return event, token_ids
    if b'"delta":{}' in event.raw and b'"finish_reason":null' in event.raw:
        return None, token_ids
    # vLLM, which writes no spaces, writes null for what it was not asked; a reference node leaves it out.
    is_vllm = b'"token_ids":[' in event.raw
    raw = TOKEN_IDS.sub(rb'\1"token_ids":null' if is_vllm else b"", event.raw, count=1)
    return _without_prompt(raw), token_ids


def _without_prompt(raw: bytes) -> Event:
    return Event(_PROMPT_TOKEN_IDS.sub(b'"prompt_token_ids":null', raw, count=1))


@dataclass
class ReferenceBeginning(Beginning):
    """For reference nodes, which take the tokens of an answer, and hold back the same of its text as the node
    before.

    Attributes:
        model: Digest of the node that chose the tokens.
    """

    created: int
    model: str
    token_ids: list[int] = field(default_factory=list)
    _num_prompt_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def can_continue_at(self, node: Abilities) -> bool:
        return bool(self.model) and node.continues_answers == self.model and not node.vllm_max_model_len

    def decode_body(
        self, body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        known = {"token_ids": list(self.token_ids), "created": self.created, "model": self.model}
        return {**body, "kv_transfer_params": {**(kv_transfer_params or {}), CONTINUES: known}}

    def continued(self) -> Filter:
        return lambda event: (event,)

    def add(self, token_ids: Sequence[int], event: Event) -> None:
        self.token_ids += token_ids
        if b'"num_prompt_tokens"' in event.raw and isinstance(metrics := event.content.get("metrics"), dict):
            self._num_prompt_tokens = count_of(metrics.get("num_prompt_tokens"))

    def usage(self) -> Mapping[str, int] | None:
        num = self._num_prompt_tokens
        return None if num is None else _usage(num, len(self.token_ids))


@dataclass
class StitchedBeginning(Beginning):
    """For servers of vLLM, which get prompt and tokens as one prompt.

    Such a server holds back the text of a token that is a part of a character, and may put several tokens
    into one event. So after some tokens it is not known how much of their text the client has. Another server
    is told the tokens up to the last one that ended a text. It chooses those after it once more, and what the
    client has of their text is taken out. Not so tokens that have come alone before, each with a text of its
    own: after a whole character they always end one.

    Attributes:
        model: Identity of the server that chose the tokens.
        prompt: The token ids of the prompt.
        max_tokens: Length limit of the whole answer.
        token_ids: The tokens that another server is told.
        chat: What all events of a chat begin with; empty: the answer is a completion.
    """

    created: int
    model: str
    prompt: tuple[int, ...]
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    chat: Mapping[str, Any] = field(default_factory=dict)
    path: str | None = COMPLETIONS
    _is_plain: bool = True  # the answer has nothing but text
    _later_ids: list[int] = field(default_factory=list)  # of the present server, after `token_ids`
    _later_text: str = ""  # theirs
    _sent_text: str = ""  # that the client has after that of `token_ids`
    _whole_ids: set[int] = field(default_factory=set)  # each came alone after a whole character, ending one

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_told_whole(self) -> bool:
        return not self._later_ids

    def can_continue_at(self, node: Abilities) -> bool:
        if node.continues_answers != self.model or not self._is_plain:
            return False
        if 0 < node.vllm_most_tokens < self.max_tokens:
            return False  # it would count from its first token
        # A server refuses a request whose prompt and `max_tokens` are longer than this, which must not happen
        # half-way.
        return len(self.prompt) + self.max_tokens <= node.vllm_max_model_len

    def decode_body(
        self, body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        # The server compares the identity with its own once more: it may have changed since it was asked.
        params = {**(kv_transfer_params or {}), CONTINUES: {"model": self.model}}
        return {
            **{name: body[name] for name in (_SAMPLING if self.chat else body) if name in body},
            "prompt": [*self.prompt, *self.token_ids],
            "max_tokens": self.max_tokens - len(self.token_ids),
            "kv_transfer_params": params,
        }

    def continued(self) -> Filter:
        self._later_ids, self._later_text = [], ""
        return _Rewriter(self.created, len(self.token_ids), self._sent_text, self.chat)

    def add(self, token_ids: Sequence[int], event: Event) -> None:
        choice = choice_of(event.content)
        delta = choice.get("delta")
        if isinstance(delta, dict) and any(delta[key] for key in delta.keys() - {"role", "content"}):
            self._is_plain = False  # thoughts, or calls of tools: a completion would give them as text
        text = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        text = text if isinstance(text, str) else ""
        is_alone, ends_text = len(token_ids) == 1, text and not text.endswith(REPLACEMENT)
        if is_alone and ends_text and not self._later_ids:
            self._whole_ids.update(token_ids)
        self._later_ids += token_ids
        self._later_text += text
        if len(self._later_text) > len(self._sent_text):
            self._sent_text = self._later_text
        if ends_text and (is_alone or self._whole_ids.issuperset(self._later_ids)):
            # Nothing is held back: the server would have held back all of a text that ends with a part of a
            # character.
            self.token_ids += self._later_ids
            self._sent_text = self._sent_text[len(self._later_text) :]
            self._later_ids, self._later_text = [], ""

    def usage(self) -> Mapping[str, int]:
        return _usage(len(self.prompt), len(self.token_ids) + len(self._later_ids))


def _usage(num_prompt: int, num_output: int) -> Mapping[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_output,
        "completion_tokens": num_output,
    }


@dataclass
class _Rewriter:
    """Turns the stream of a server that goes on with an answer into the rest of a stream of one server.

    Attributes:
        created: Of the answer.
        num_known: Tokens of the answer at the end of the server's prompt.
        sent_text: That the client has of what the server chooses once more.
        chat: What all events of a chat begin with; empty: the answer is a completion.
    """

    created: int
    num_known: int
    sent_text: str
    chat: Mapping[str, Any]

    def __call__(self, event: Event) -> list[Event]:
        event = dated(event, self.created)
        events = self._without_sent(event) if self.sent_text else [self._counted(event)]
        return [self._as_chat(each) for each in events] if self.chat else events

    def _counted(self, event: Event) -> Event:
        usage = event.content.get("usage") if b'"usage":{' in event.raw else None
        if not isinstance(usage, dict):
            return event
        # The server's prompt ends with the beginning of the answer.
        for name, change in (("prompt_tokens", -self.num_known), ("completion_tokens", self.num_known)):
            if (count := count_of(usage.get(name))) is not None:
                usage[name] = count + change
        return Event.of(event.content)

    def _without_sent(self, event: Event) -> list[Event]:
        choice = choice_of(event.content)
        text = choice.get("text")
        if not isinstance(text, str):
            return [event]  # an error
        if self.sent_text.startswith(text) and choice.get("finish_reason") is None:
            self.sent_text = self.sent_text[len(text) :]
            return []
        if not text.startswith(self.sent_text):
            raise OtherTokenError
        rest, self.sent_text = text[len(self.sent_text) :], ""
        return [Event.of({**event.content, "choices": [{**choice, "text": rest}]})]

    def _as_chat(self, event: Event) -> Event:
        content = event.content
        if not content or "error" in content:
            return event
        choices = []
        if choice := choice_of(content):
            text = choice.get("text")
            keys = ("stop_reason",) if choice.get("finish_reason") is not None else ()
            known = {
                key: choice.get(key) for key in ("index", "logprobs", "finish_reason", *keys, "token_ids")
            }
            choices = [{"delta": {"content": text} if text else {}, **known}]
        rest = {key: content[key] for key in ("usage", "system_fingerprint") if key in content}
        return Event.of({**self.chat, "choices": choices, **rest})


# -- events ------------------------------------------------------------------------------------------


def dated(event: Event, created: int) -> Event:
    """Return an event with another time.

    A stream has one; text follows after it, so the first match is the field.
    """
    return Event(_CREATED.sub(rb"\g<1>%d" % created, event.raw, count=1))


def choice_of(chunk: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the only choice of a chunk; empty if it has another number of them."""
    match chunk.get("choices"):
        case [dict() as choice]:
            return choice
    return {}


def ids_in(value: object) -> tuple[int, ...]:
    """Return a list of token ids; empty if it is something else."""
    return tuple(value) if isinstance(value, list) and all(type(one) is int for one in value) else ()
