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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..web.json_body import MAX_DEPTH, is_deeper_than
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
class Conversation:
    """What is known of a conversation: what its latest turn left.

    Attributes:
        prefill_url: Of its prefill node, which has its prompts in its prefix cache; empty if none is known.
        answer: The offer of its answer, which can be loaded once.
        question: Ends when the decode node has been asked for that offer. None if it is not asked.
    """

    prefill_url: str = ""
    answer: Answer | None = None
    question: asyncio.Task[None] | None = None

    @property
    def has_answer(self) -> bool:
        """Whether `take_answer` would return one."""
        return self.answer is not None and self.answer.is_usable

    def take_answer(self) -> Answer | None:
        """Return the offer of the latest answer, the first time. It can be loaded once."""
        answer, self.answer = self.answer, None
        return answer if answer is not None and answer.is_usable else None


#: A turn of a conversation: by which key it is remembered, and what is known of it. Without a key it belongs to none.
Turn = tuple[bytes | None, Conversation]


class Sessions:
    """The conversations that are remembered."""

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._max_conversations = max_conversations
        self._conversations: collections.OrderedDict[bytes, Conversation] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._conversations)

    @property
    def num_answers(self) -> int:
        """Offers of answers that a next turn could load now."""
        return sum(conversation.has_answer for conversation in self._conversations.values())

    async def begin_informed(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Turn:
        """Do the same as `begin`, but wait first if a decode node is just being asked for the offer of the latest answer."""
        turn = self.begin(body, headers)
        if (question := turn[1].question) is None:
            return turn
        await asyncio.wait({question}, timeout=QUESTION_WAIT_S)
        return self.begin(body, headers)  # an offer replaces what was known of the conversation

    def begin(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Turn:
        """Find the conversation that a request continues."""
        if any(body.get(name) not in (None, 1) for name in ("n", "best_of")):
            return None, Conversation()  # which of the answers the conversation goes on with is not known
        named = [
            headers.get("Authorization", ""),
            *(str(body.get(name) or "") for name in ("model", "cache_salt")),
        ]
        if session_id := headers.get(SESSION_HEADER, ""):
            keys = [_digest("id", *named, session_id).digest()]
            return keys[0], self._known(keys)
        messages = body.get("messages")
        if not isinstance(messages, list):
            return None, Conversation()
        keys = _keys_of(named, messages)
        return keys[-1], self._known(keys[:-1])

    def _known(self, keys: Sequence[bytes]) -> Conversation:
        for key in reversed(keys):
            if key in self._conversations:
                self._conversations.move_to_end(key)
                return self._conversations[key]
        return Conversation()

    def remember(self, key: bytes | None, conversation: Conversation) -> Answer | None:
        """Replace what is known of a conversation; return the offer that is no longer of use."""
        if key is None:
            return conversation.answer
        replaced = self._conversations.pop(key, Conversation()).answer
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


def take_offer(payload: bytes) -> tuple[bytes, Params | None]:
    """Take the offer of an answer out of what a node sends, because it is none of the client's business.

    Args:
        payload: A whole answer, or one event of a stream.

    Returns:
        The same bytes without the offer, and its `kv_transfer_params`. None: there is none, or it is too large to be kept.
    """
    at = payload.find(_PARAMS_KEY)
    if at < 0:
        return payload, None
    # In a text the closing quote would be escaped, so this is a key.
    head, tail = payload[: at + len(_PARAMS_KEY)], payload[at + len(_PARAMS_KEY) :]
    text = tail.decode(errors="surrogateescape").lstrip()
    try:
        params, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return payload, None
    if not isinstance(params, dict) or "answer_lease_s" not in params:
        return payload, None
    is_small = end <= MAX_OFFER_CHARS and not is_deeper_than(params, MAX_DEPTH)
    return head + b" null" + text[end:].encode(errors="surrogateescape"), params if is_small else None
