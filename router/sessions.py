"""Remember, per conversation, which node computed its prompt and which answer a decode node offers to the next turn.

A conversation is known by the header `X-Session-ID`. Without the header, a chat continues the conversation whose messages are the
longest beginning of its own. A completion without the header is a conversation of its own. Callers with different keys, models
or cache salts never share a conversation.

The router cannot know whether a prompt really continues an answer, and need not: nodes compare digests of the tokens, and a prefill
node that cannot load an answer computes it.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..web.json_body import MAX_DEPTH, is_deeper_than
from ..web.sse import Event
from .nodes import UpstreamNode
from .states import USABLE

SESSION_HEADER = "X-Session-ID"
#: Conversations that are remembered. The ones that were idle for longest are forgotten.
MAX_CONVERSATIONS = 4096
#: How long a turn waits for a decode node that was asked for the offer of the latest answer. Programs take turns at once.
QUESTION_WAIT_S = 1.0
#: A longer offer of an answer is not kept, nor one with a longer lease. An offer of a million tokens has half of this.
MAX_OFFER_CHARS = 1 << 20
MAX_LEASE_S = 24 * 3600.0
_PARAMS_KEY = b'"kv_transfer_params":'

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """The offer of a prompt and its answer.

    Attributes:
        node: The decode node that made it.
        usable_until: When its lease ends, by `time.monotonic()`.
    """

    node: UpstreamNode
    params: Params
    usable_until: float

    @classmethod
    def of(cls, node: UpstreamNode, params: Params) -> Answer:
        """Take in the params of an answer that has just arrived."""
        lease_s = params.get("answer_lease_s")
        if not isinstance(lease_s, int | float) or not 0 <= lease_s <= MAX_LEASE_S:
            lease_s = 0.0
        return cls(node, params, time.monotonic() + lease_s)

    @property
    def is_usable(self) -> bool:
        return time.monotonic() < self.usable_until and self.node.state in USABLE


@dataclass
class _Conversation:
    """What the latest turn left.

    Attributes:
        prefill_url: Of its prefill node.
        answer: The offer of its answer, which can be loaded once.
        question: Ends when the decode node has been asked for that offer. None if it is not asked.
    """

    prefill_url: str = ""
    answer: Answer | None = None
    question: asyncio.Task[None] | None = None


class Turn:
    """One turn of a conversation, or a request that belongs to none.

    Attributes:
        preferred_url: The node that has the conversation's prompts in its prefix cache; empty if none is known.
        prefill_url: The node that has computed this turn's prompt; until then the same.
    """

    def __init__(self, sessions: Sessions | None, key: bytes, before: _Conversation) -> None:
        self._sessions = sessions
        self._key = key
        self._before = before
        self.preferred_url = self.prefill_url = before.prefill_url

    @property
    def is_remembered(self) -> bool:
        """Whether an answer that a node offers is of use to a later turn."""
        return self._sessions is not None

    @property
    def question(self) -> asyncio.Task[None] | None:
        """Ends when the decode node of the latest turn has been asked for the offer of its answer."""
        return self._before.question

    @property
    def has_answer(self) -> bool:
        """Whether `take_answer` would return one."""
        answer = self._before.answer
        return answer is not None and answer.is_usable

    def take_answer(self) -> Answer | None:
        """Return the offer of the conversation's latest answer, the first time. It can be loaded once."""
        answer, self._before.answer = self._before.answer, None
        return answer if answer is not None and answer.is_usable else None

    def end(self, answer: Answer | None, question: asyncio.Task[None] | None = None) -> Answer | None:
        """Remember what this turn leaves.

        Args:
            question: Calls this again if it finds an offer.

        Returns:
            An offer that no turn can use any more.
        """
        if self._sessions is None:
            return answer
        return self._sessions.remember(self._key, _Conversation(self.prefill_url, answer, question))


def no_turn() -> Turn:
    """Return the turn of a request that belongs to no conversation."""
    return Turn(None, b"", _Conversation())


class Sessions:
    """The conversations that are remembered."""

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._max_conversations = max_conversations
        self._conversations: collections.OrderedDict[bytes, _Conversation] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._conversations)

    @property
    def num_answers(self) -> int:
        """Offers of answers that a next turn could load now."""
        answers = (conversation.answer for conversation in self._conversations.values())
        return sum(answer is not None and answer.is_usable for answer in answers)

    async def begin_informed(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Turn:
        """Do the same as `begin`, but wait first if a decode node is just being asked for the offer of the latest answer."""
        turn = self.begin(body, headers)
        if turn.question is None:
            return turn
        await asyncio.wait({turn.question}, timeout=QUESTION_WAIT_S)
        return self.begin(body, headers)  # an offer replaces what was known of the conversation

    def begin(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Turn:
        if any(body.get(name) not in (None, 1) for name in ("n", "best_of")):
            return no_turn()  # which of the answers the conversation goes on with is not known
        named = [
            headers.get("Authorization", ""),
            *(str(body.get(name) or "") for name in ("model", "cache_salt")),
        ]
        if session_id := headers.get(SESSION_HEADER, ""):
            keys = [_digest("id", *named, session_id).digest()]
            return Turn(self, keys[0], self._known(keys))
        messages = body.get("messages")
        if not isinstance(messages, list):
            return no_turn()
        keys = _keys_of(named, messages)
        return Turn(self, keys[-1], self._known(keys[:-1]))

    def _known(self, keys: Sequence[bytes]) -> _Conversation:
        for key in reversed(keys):
            if key in self._conversations:
                self._conversations.move_to_end(key)
                return self._conversations[key]
        return _Conversation()

    def remember(self, key: bytes, conversation: _Conversation) -> Answer | None:
        """Replace what is known of a conversation; return the offer that is no longer of use."""
        replaced = self._conversations.pop(key, _Conversation()).answer
        self._conversations[key] = conversation
        if len(self._conversations) > self._max_conversations:
            _, idle = self._conversations.popitem(last=False)
            replaced = replaced or idle.answer
        return replaced


def _keys_of(named: Sequence[str], messages: Sequence[object]) -> list[bytes]:
    """Return a key for no message, the first message, the first two, and so on."""
    digest = _digest("messages", *named)
    keys = [digest.digest()]
    for message in messages:
        digest.update(json.dumps(message, sort_keys=True).encode() + b"\0")
        keys.append(digest.digest())
    return keys


def _digest(*texts: str) -> Any:
    return hashlib.sha256(json.dumps(texts).encode())


class AnswerTaker:
    """Takes the offer of an answer out of what a node sends, because it is none of the client's business.

    Attributes:
        params: The `kv_transfer_params` of the offer; None as long as there was none.
        note: Called with them.
    """

    def __init__(self) -> None:
        self.params: Params | None = None
        self.note: Callable[[Params], object] = lambda params: None

    def whole(self, payload: bytes) -> bytes:
        """Return a whole answer without the offer."""
        at = payload.find(_PARAMS_KEY)
        if at < 0:
            return payload
        # In a text the closing quote would be escaped, so this is a key.
        head, tail = payload[: at + len(_PARAMS_KEY)], payload[at + len(_PARAMS_KEY) :]
        text = tail.decode(errors="surrogateescape").lstrip()
        try:
            params, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return payload
        if not isinstance(params, dict) or "answer_lease_s" not in params:
            return payload
        if end <= MAX_OFFER_CHARS and not is_deeper_than(params, MAX_DEPTH):
            self.params = params
            self.note(params)
        return head + b" null" + text[end:].encode(errors="surrogateescape")

    def __call__(self, event: Event) -> list[Event]:
        """Return an event of a stream without the offer."""
        return [Event(self.whole(event.raw))] if _PARAMS_KEY in event.raw else [event]
