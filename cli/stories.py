"""What a node may tell about a request, as far as `kvferry explain` tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from kvferry.transports.checked import Check, Refused, each, integer, record, seconds

from .errors import CommandError


def checked_answer(answer: Any) -> Mapping[str, Any]:
    """Return a node's answer about a request as it is, if every value that is told has its type.

    Raises:
        CommandError: It has not; the error names the value.
    """
    try:
        record(_Answer).read_known(answer)
    except Refused as error:
        raise CommandError(f"it answers what no reference node answers: {error}") from error
    known: Mapping[str, Any] = answer
    return known


_time, _count = seconds(0, 1e15), integer(0, 1 << 62)


def _known(cls: type) -> Check:
    return lambda value: record(cls).read_known(value)


def _ending(value: object) -> object:
    """Accept what a story says of its end: an empty mapping while there is none."""
    return _known(_Ending)(value) if value != {} else None


@dataclass(frozen=True)
class _Event:
    at: Annotated[float, _time]
    name: str


@dataclass(frozen=True)
class _Transfer:
    transport: str
    mechanism: str
    num_blocks: Annotated[int, _count]
    num_regions: Annotated[int, _count]
    num_bytes: Annotated[int, _count]
    seconds: Annotated[float, _time]
    exposed_seconds: Annotated[float, _time]
    reason: str
    error: str


@dataclass(frozen=True)
class _Metrics:
    num_cached_tokens: Annotated[int, _count]
    num_loaded_tokens: Annotated[int, _count]
    num_output_tokens: Annotated[int, _count]
    ttft_s: Annotated[float, _time]
    transfer: Annotated[_Transfer | None, _known(_Transfer)] = None


@dataclass(frozen=True)
class _Ending:
    error: str
    finish_reason: str
    metrics: Annotated[_Metrics, _known(_Metrics)]


@dataclass(frozen=True)
class _Story:
    request_id: str
    phase: str
    arrived: Annotated[float, _time]
    num_prompt_tokens: Annotated[int, _count]
    events: Annotated[tuple[_Event, ...], each(_known(_Event), 1 << 20)]
    ending: Annotated[_Ending | None, _ending]


@dataclass(frozen=True)
class _Answer:
    engine_id: str
    stories: Annotated[tuple[_Story, ...], each(_known(_Story), 1 << 20)]
