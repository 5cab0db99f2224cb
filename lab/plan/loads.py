"""Loads: requests with their arrivals, and what their prompts have in common."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Final

import xxhash

from ...router.choice.prefixes import PIECE_TOKENS
from ...transports.checked import Refused, integer, integers, json_of, record, refuse, shown
from ...transports.errors import ConfigurationError

#: Tokens that a number in a trace's `hash_ids` stands for.
TOKENS_PER_HASH = 512
#: Of one request in a trace.
MAX_TOKENS = 10_000_000
#: Of a trace: some thirty thousand years.
MAX_MS = 1e15
#: A line with all hashes of a prompt of `MAX_TOKENS` has half of that.
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        after: Time from the start of the load to the first turn; to later ones, from the end of the answer
            before. In seconds, or in the unit of the load until it is paced.
        pieces: What it appends to the conversation: keys and numbers of tokens. Equal keys have equal tokens.
        max_tokens: Length of its answer.
    """

    after: float
    pieces: tuple[tuple[str, int], ...]
    max_tokens: int


#: The turns of a conversation. A single request is a conversation of one turn.
Conversation = tuple[Turn, ...]


def _milliseconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_MS:
        refuse("a number of milliseconds of at least 0", value)
    return value


@dataclass(frozen=True)
class _Row:
    """A line of a trace. It may have other keys as well."""

    timestamp: Annotated[float, _milliseconds]
    input_length: Annotated[int, integer(1, MAX_TOKENS)]
    output_length: Annotated[int, integer(1, MAX_TOKENS)]
    hash_ids: Annotated[tuple[int, ...], integers(0, 1 << 64, MAX_TOKENS // TOKENS_PER_HASH + 1)] = ()


_ROW: Final = record(_Row)


def read_trace(lines: Iterable[str | bytes], scale: float, number: int) -> list[Conversation]:
    """Return a trace's first requests, with their arrivals in seconds. Lengths are divided by `scale`.

    A prompt begins like another one as far as their `hash_ids` are equal.

    Raises:
        ValueError: A line is no request, or is earlier than the line before.
    """
    requests: list[Conversation] = []
    before = 0.0
    for own, line in enumerate(itertools.islice(lines, number)):
        try:
            row: _Row = _ROW.read_known(json_of(line))
            if row.timestamp < before:
                refused = f"must not be before {before:g}, that of the line before, got {row.timestamp:g}"
                raise Refused(f"{refused}; sort the trace", ".timestamp")
        except Refused as error:
            raise ValueError(
                f"line {own + 1}: {str(error).strip()}; each line is a JSON object with timestamp (ms, in the order of "
                f"arrival), input_length and output_length (tokens): correct {shown(line)}"
            ) from error
        before = row.timestamp
        left = max(1, round(row.input_length / scale))
        pieces = []
        for block in row.hash_ids:
            pieces.append((f"block {block}", min(left, max(1, round(TOKENS_PER_HASH / scale)))))
            left -= pieces[-1][1]
            if not left:
                break
        pieces += [(f"prompt {own}", left)] if left else []
        requests.append((Turn(row.timestamp / 1e3, tuple(pieces), max(1, round(row.output_length / scale))),))
    return requests


def read_trace_file(path: Path, scale: float, number: int) -> list[Conversation]:
    """Return the requests of a file.

    Raises:
        ConfigurationError: It cannot be read, or a line is no request.
    """
    try:
        with path.open("rb") as file:
            found = read_trace(_lines_of(file), scale, number)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--trace={str(path)!r}: {error}", key="--trace", value=str(path)) from error
    if not found:
        raise ConfigurationError(
            f"--trace={str(path)!r} has no lines; give a file with one request per line",
            key="--trace",
            value=str(path),
        )
    return found


def _lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file, which may be a device without a line's end."""
    for number in itertools.count(1):
        line = file.readline(MAX_LINE_BYTES + 1)
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(
                f"line {number} has more than {MAX_LINE_BYTES} bytes; give a file with one request per line"
            )
        if not line:
            return
        yield line


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
