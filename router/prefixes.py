"""Which node has how much of a prompt in its prefix cache, by what was sent where.

A prompt is a chain of pieces, each with a key that covers all pieces before it. The index keeps the nodes of each key, and drops
the keys that were not used for the longest time. Pure.

What must never break: it only guesses. A node that has less than is known here computes more, and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .policies import MAX_DEPTH, texts_in

#: Tokens per piece of a prompt of token ids, and bytes per piece of a text.
PIECE_TOKENS, PIECE_BYTES = 16, 64
#: Keys that are kept, of about 110 bytes each.
MAX_KEYS = 1 << 20
#: Pieces per prompt that are looked at.
MAX_PIECES = 4096
#: Nodes that an index tells apart; with another one it begins anew. Restarted nodes count again.
MAX_NODES = 1024


class Prefixes:
    """The index."""

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._nodes: dict[int, int] = {}  # key → a bit per node
        self._bits: dict[str, int] = {}  # URL → its bit
        self._num_bits = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, keys: Sequence[int], url: str) -> None:
        """Note that a node has computed or loaded these pieces."""
        if (bit := self._bits.get(url)) is None:
            if self._num_bits >= MAX_NODES:
                self._nodes.clear()
                self._bits.clear()
                self._num_bits = 0
            bit = self._bits[url] = 1 << self._num_bits
            self._num_bits += 1
        for key in keys:
            self._nodes[key] = self._nodes.pop(key, 0) | bit
        while len(self._nodes) > self._max_keys:
            del self._nodes[next(iter(self._nodes))]

    def forget(self, url: str) -> None:
        """Forget what a node has had, because its process has ended."""
        self._bits.pop(url, None)

    def shares(self, keys: Sequence[int]) -> Mapping[str, float]:
        """Return the share of a prompt that each node has: URL → 0 to 1. Those without a share are left out."""
        if not keys:
            return {}
        counts: dict[int, int] = {}  # number of pieces → the nodes that have exactly these
        held = -1
        for number, key in enumerate(keys):
            still = self._nodes.get(key, 0) & held
            if gone := held & ~still if number else 0:
                counts[number] = gone
            held = still
            if not held:
                break
        else:
            counts[len(keys)] = held
        return {
            url: number / len(keys)
            for url, bit in self._bits.items()
            for number, bits in counts.items()
            if bits & bit
        }


def keys_of(body: Mapping[str, Any]) -> list[int]:
    """Return the keys of the whole pieces of a request's prompt."""
    # An adapter or a salt changes what a prefix cache has.
    key = hash((str(body.get("model") or ""), str(body.get("cache_salt") or "")))
    keys = []
    for piece in _pieces(body):
        key = hash((key, piece))
        keys.append(key)
        if len(keys) == MAX_PIECES:
            break
    return keys


def _pieces(body: Mapping[str, Any]) -> Iterator[bytes]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a list with one prompt
    if isinstance(prompt, list):
        try:
            raw, size = array("q", prompt).tobytes(), 8 * PIECE_TOKENS
        except (TypeError, OverflowError):
            return
    else:
        # Most chat templates write the tools before the messages.
        told = texts_in([prompt, body.get("tools"), body.get("messages")], MAX_DEPTH)
        raw, size = "".join(told).encode(errors="surrogatepass"), PIECE_BYTES
    for at in range(0, len(raw) - size + 1, size):
        yield raw[at : at + size]
