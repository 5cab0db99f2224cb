"""Loads: requests with their arrivals, and what their prompts have in common."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ..router.prefixes import PIECE_TOKENS
from ..transports.errors import ConfigurationError

#: Tokens that a number in a trace's `hash_ids` stands for.
TOKENS_PER_HASH = 512
#: Of one request in a trace.
MAX_TOKENS = 10_000_000


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        after: Time from the start of the load to the first turn; to later ones, from the end of the answer before. In seconds,
            or in the unit of the load until it is paced.
        pieces: What it appends to the conversation: keys and numbers of tokens. Equal keys have equal tokens.
        max_tokens: Length of its answer.
    """

    after: float
    pieces: tuple[tuple[str, int], ...]
    max_tokens: int


#: The turns of a conversation. A single request is a conversation of one turn.
Conversation = tuple[Turn, ...]


def read_trace(lines: Iterable[str], scale: float, number: int) -> list[Conversation]:
    """Return a trace's first requests, with their arrivals in seconds. Lengths are divided by `scale`.

    A prompt begins like another one as far as their `hash_ids` are equal.

    Raises:
        ValueError: A line is no request.
    """
    requests: list[Conversation] = []
    for own, line in enumerate(lines):
        if own == number:
            break
        try:
            row = json.loads(line)
            at, given, taken = row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"])
            hashes = [int(each) for each in row.get("hash_ids", ())]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"line {own + 1} must be a JSON object with timestamp (ms), input_length and output_length (tokens): "
                f"{error!r}; got {line[:100]!r}"
            ) from error
        if not (0 <= at < float("inf") and 0 <= given <= MAX_TOKENS and 0 <= taken <= MAX_TOKENS):
            raise ValueError(f"line {own + 1} has a number out of range: {line[:100]!r}")
        left = max(1, round(given / scale))
        pieces = []
        for block in hashes:
            pieces.append((f"block {block}", min(left, max(1, round(TOKENS_PER_HASH / scale)))))
            left -= pieces[-1][1]
            if not left:
                break
        pieces += [(f"prompt {own}", left)] if left else []
        requests.append((Turn(at, tuple(pieces), max(1, round(taken / scale))),))
    return requests


def read_trace_file(path: Path, scale: float, number: int) -> list[Conversation]:
    """Return the requests of a file.

    Raises:
        ConfigurationError: It cannot be read, or a line is no request.
    """
    try:
        with path.open() as file:
            found = read_trace(file, scale, number)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--trace={str(path)!r}: {error}", key="--trace", value=str(path)) from error
    if not found:
        raise ConfigurationError(f"--trace={str(path)!r} has no lines", key="--trace", value=str(path))
    return found


def sizes(plan: Sequence[Conversation]) -> Iterator[tuple[int, int]]:
    """Yield the tokens of each request's prompt and answer."""
    for turns in plan:
        total = 0
        for turn in turns:
            total += sum(number for _, number in turn.pieces)
            yield total, turn.max_tokens
            total += turn.max_tokens


@dataclass(frozen=True)
class Arrival:
    """A request to come.

    Attributes:
        at: In seconds; with `after`, from the end of that answer.
        num_tokens: Of the prompt.
        keys: One per `PIECE_TOKENS` tokens of the prompt, and equal for equal beginnings.
        after: The request before it in its conversation, by its place among the arrivals.
    """

    at: float
    num_tokens: int
    keys: Sequence[int]
    num_answer_tokens: int
    after: int | None = None


def arrivals_of(plan: Sequence[Conversation]) -> list[Arrival]:
    """Return the requests of conversations, each with all that was said before it."""
    found: list[Arrival] = []
    for own, turns in enumerate(plan):
        said: tuple[tuple[str, int], ...] = ()
        before = None
        for number, turn in enumerate(turns):
            said += turn.pieces
            num_tokens = sum(length for _, length in said)
            found.append(Arrival(turn.after, num_tokens, _keys_of(said), turn.max_tokens, before))
            before = len(found) - 1
            said += ((f"answer {own} {number}", turn.max_tokens),)
    return found


def _keys_of(pieces: Sequence[tuple[str, int]]) -> list[int]:
    """Return what `router.prefixes.keys_of` would say of such tokens, but for the values: a chain of keys."""
    keys: list[int] = []
    parts, room, key = [], PIECE_TOKENS, 0
    for name, length in pieces:
        at = 0
        while at < length:
            taken = min(room, length - at)
            parts.append(f"{name}@{at}+{taken}")
            at, room = at + taken, room - taken
            if not room:
                key = xxhash.xxh64_intdigest(f"{key} {parts}".encode())
                keys.append(key)
                parts, room = [], PIECE_TOKENS
    return keys
