"""Remember, per conversation, which node computed its prompt.

A conversation is known by the header `X-Session-ID`. Without the header, a chat continues the conversation
whose messages are the longest beginning of its own. A completion without the header is a conversation of its
own. Callers with different keys, models or cache salts never share a conversation.
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SESSION_HEADER = "X-Session-ID"
#: Conversations that are remembered. The ones that were idle for longest are forgotten.
MAX_CONVERSATIONS = 4096


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation.

    Attributes:
        key: By which the conversation is remembered after this turn. None: the turn belongs to none.
        prefill_url: Of the node that has the earlier prompts in its prefix cache; empty if none is known.
    """

    key: bytes | None = None
    prefill_url: str = ""


NO_TURN = Turn()


class Sessions:
    """The conversations that are remembered.

    Attributes:
        on_remembered: Called with what `note` is called with here, for other processes of this router.
    """

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._max_conversations = max_conversations
        self.on_remembered: Callable[[bytes, str], None] = lambda key, prefill_url: None
        self._prefill_urls: collections.OrderedDict[bytes, str] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._prefill_urls)

    def begin(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Turn:
        """Find the conversation that a request continues."""
        named = [
            headers.get("Authorization", ""),
            *(str(body.get(name) or "") for name in ("model", "cache_salt")),
        ]
        if session_id := headers.get(SESSION_HEADER, ""):
            keys = [_digest("id", *named, session_id).digest()]
            return Turn(keys[0], self._known(keys))
        messages = body.get("messages") or body.get("input")
        if not isinstance(messages, list):
            return NO_TURN
        keys = _keys_of(named, messages)
        return Turn(keys[-1], self._known(keys[:-1]))

    def _known(self, keys: Sequence[bytes]) -> str:
        for key in reversed(keys):
            if key in self._prefill_urls:
                self._prefill_urls.move_to_end(key)
                return self._prefill_urls[key]
        return ""

    def remember(self, turn: Turn, prefill_url: str) -> None:
        """Note which node has computed the prompt of a turn."""
        if turn.key is not None:
            self.note(turn.key, prefill_url)
            self.on_remembered(turn.key, prefill_url)

    def note(self, key: bytes, prefill_url: str) -> None:
        """Note which node has computed the prompt of a conversation."""
        self._prefill_urls[key] = prefill_url
        self._prefill_urls.move_to_end(key)
        if len(self._prefill_urls) > self._max_conversations:
            self._prefill_urls.popitem(last=False)


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
