"""Bound the number of tokens of a text from below by its size, to refuse a text that cannot fit before tokenizing it.

A token stands for a limited number of bytes, so a text of N bytes has at least N / limit tokens. This holds only if the
tokenizer drops no part of a text. If that is unknown, the bound is 0, and no text is refused by its size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase

#: Unicode's normal forms, and lower case, make a text shorter by at most this factor, in bytes.
_MOST_BYTES_INTO_ONE = 4.0
_RESHAPING = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase"})
_GROWING = frozenset({"ByteLevel", "Prepend"})
#: Pre-tokenizers that only split a text, or only make it longer.
_KEEPING = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
#: Pre-tokenizers that remove the separator if their `behavior` says so.
_PERHAPS_KEEPING = frozenset({"Punctuation", "Split"})

#: Unicode's white space. An added token may swallow any amount of it on its left or right.
_WHITESPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)

#: The bytes that occur in UTF-8, and the letters that byte-level tokenizers use for all bytes: a byte that is printable in
#: Latin-1 is its own letter, and the others take the letters from U+0100 on, in order.
_BYTES = tuple(byte for byte in range(256) if byte not in (0xC0, 0xC1) and byte < 0xF5)
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(0x100 + n) for n, byte in enumerate(_OTHERS)}


@dataclass(frozen=True)
class SizeBound:
    """The longest text that one token can stand for.

    Attributes:
        bytes_per_token: Most bytes of UTF-8 per token; infinite if there is no limit.
        skips_whitespace: White space may disappear, so it does not count.
        dropped_bytes: Bytes that have no token, so they do not count.
    """

    bytes_per_token: float = math.inf
    skips_whitespace: bool = False
    dropped_bytes: bytes = b""

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` has at least.

        Raises:
            UnicodeEncodeError: `text` contains surrogates, so it is not valid Unicode.
        """
        num_bytes = len(text.encode().translate(None, self.dropped_bytes))
        if self.skips_whitespace:
            num_bytes -= sum(text.count(space) * len(space.encode()) for space in _WHITESPACE)
        return max(0, math.ceil(num_bytes / self.bytes_per_token))


def size_bound_of(tokenizer: PreTrainedTokenizerBase) -> SizeBound:
    """Return the bound that holds for every text that `tokenizer` encodes."""
    backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        return SizeBound()  # its rules are Python code, which this module cannot analyse
    shrinking = math.prod(map(_shrinking, _parts(backend.normalizer, "normalizers")))
    steps = _parts(backend.pre_tokenizer, "pretokenizers")
    dropped = _dropped_bytes(backend)
    if not math.isfinite(shrinking) or not all(map(_keeps_all, steps)) or dropped is None:
        return SizeBound()
    added = list(backend.get_added_tokens_decoder().values())
    swallowing = [token for token in added if token.lstrip or token.rstrip]
    # Dropped bytes and white space are counted in the raw text. A normalizer could turn other text into them, so with one
    # there is no bound.
    if backend.normalizer is not None and (dropped or any(token.normalized for token in swallowing)):
        return SizeBound()
    longest = max(_longest_token(backend), max((_added_bytes(backend, token) for token in added), default=0))
    return SizeBound(shrinking * longest, bool(swallowing), dropped)


def _parts(component: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or a pre-tokenizer, in their serialized form."""

    def steps(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        if state["type"] != "Sequence":
            yield state
        for inner in state.get(key, ()):
            yield from steps(inner)

    if component is not None:
        yield from steps(json.loads(component.__getstate__()))


def _shrinking(step: Mapping[str, Any]) -> float:
    """Return the largest factor by which a normalizer makes a text shorter, in bytes; infinite if it may drop something."""
    if step["type"] in _GROWING:
        return 1.0
    if step["type"] in _RESHAPING:
        return _MOST_BYTES_INTO_ONE
    if step["type"] == "Replace":
        before, after = step["pattern"].get("String", ""), step["content"]
        return max(1.0, len(before.encode()) / len(after.encode())) if before and after else math.inf
    return math.inf


def _keeps_all(step: Mapping[str, Any]) -> bool:
    kind = step["type"]
    return kind in _KEEPING or (kind in _PERHAPS_KEEPING and step["behavior"] != "Removed")


def _is_byte_level(backend: Tokenizer) -> bool:
    steps = (*_parts(backend.normalizer, "normalizers"), *_parts(backend.pre_tokenizer, "pretokenizers"))
    return any(step["type"] == "ByteLevel" for step in steps)


def _dropped_bytes(backend: Tokenizer) -> bytes | None:
    """Return the bytes that have no token. The tokenizer drops them, or makes one token of a run of them.

    None means that any byte may be such a byte.
    """
    model: Any = backend.model
    if _is_byte_level(backend):
        affixes = getattr(model, "continuing_subword_prefix", ""), getattr(model, "end_of_word_suffix", "")
        if type(model).__name__ != "BPE" or any(affixes):
            return None
        return bytes(byte for byte in _BYTES if model.token_to_id(_LETTERS[byte]) is None)
    has_all = all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in _BYTES)
    return b"" if getattr(model, "byte_fallback", False) and has_all else None


def _longest_token(backend: Tokenizer) -> int:
    """Return the most bytes of text that one token of the vocabulary stands for."""
    tokens = backend.get_vocab(with_added_tokens=False)
    # At byte level each character of a token is one byte.
    sizes = map(len, tokens) if _is_byte_level(backend) else (len(token.encode()) for token in tokens)
    return max(sizes, default=0)


def _added_bytes(backend: Tokenizer, token: AddedToken) -> int:
    plain = len(token.content.encode())
    if token.normalized and backend.normalizer is not None:  # the tokenizer looks for it in normalized text
        return max(plain, len(backend.normalizer.normalize_str(token.content).encode()))
    return plain
