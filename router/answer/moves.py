"""Recognizes an answer that its node has stopped, for another node to go on with it. Pure.

The client must not see where one node stopped: it gets the event that the node would have sent if it had gone
on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...connector.p2p.params import MOVED, STOPPED_TO_MOVE
from ..http.json_body import object_of
from ..http.sse import Event
from .beginnings import choice_of

SIGNS = f'"{MOVED}"'.encode(), STOPPED_TO_MOVE.encode()


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of an answer that its node has stopped.

    Attributes:
        event: Its last token, as if the answer went on.
        params: Of the offer of prompt and answer; None if there is none, so that the next node computes both.
    """

    event: Event
    params: Mapping[str, Any] | None


def stop_of(event: Event) -> Stop | None:
    """Return what an event says of a stop; None if it is an ordinary one."""
    if not any(sign in event.raw for sign in SIGNS):
        return None  # parsing each event would take time
    content, choice = event.content, choice_of(event.content)
    if choice.get("finish_reason") == MOVED:
        rest = {key: value for key, value in content.items() if key not in ("kv_transfer_params", "metrics")}
        text = json.dumps({**rest, "choices": [{**choice, "finish_reason": None}]})  # as the node writes it
        return Stop(Event(b"data: " + text.encode() + b"\n\n"), _object(content.get("kv_transfer_params")))
    if (told := signal_in(choice, STOPPED_TO_MOVE)) is None:
        return None
    params = object_of(told.encode())
    goes_on = {**choice, "finish_reason": None, "stop_reason": None}
    return Stop(Event.of({**content, "choices": [goes_on]}), params or None)


def signal_in(choice: Mapping[str, Any], sign: str) -> str | None:
    """Return what a vLLM node's connector says after `sign` at the end of an answer; None if it says no such
    thing.

    A client's own stop text may be the same as the sign. But vLLM then ends the answer by `stop`, and the
    connector ends it by `length`, for which vLLM gives no stop reason.
    """
    reason = choice.get("stop_reason")
    if choice.get("finish_reason") != "length" or not isinstance(reason, str) or not reason.startswith(sign):
        return None
    return reason.removeprefix(sign)


def _object(value: object) -> Mapping[str, Any] | None:
    return value if isinstance(value, dict) and value else None
