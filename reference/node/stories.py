"""The stories of the latest requests: when each arrived, what its handoff did, and how it ended.

`kvferry explain` joins the stories of the nodes that took part in a request. A story has no word of the prompt or the answer.
The spans of a request's phases are made of its story.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ...connector.stats import KVConnectorStats
from ...web.tracing import NO_SPAN, Span
from ..engine.types import GenerationRequest, RequestOutput

#: Stories that a node keeps, and events of each.
MAX_STORIES: Final = 512
MAX_EVENTS: Final = 256

#: Stories that one answer contains: a client may use an id again and again.
_MAX_FOUND: Final = 16


@dataclass
class Story:
    """What is known about one request on this node.

    Attributes:
        arrived: In seconds since 1970, as the times of events.
        has_output: The first piece of the answer was made.
        ending: How it ended; empty while it runs.
    """

    request_id: str
    phase: str
    arrived: float
    num_prompt_tokens: int
    events: list[dict[str, Any]] = field(default_factory=list)
    has_output: bool = False
    ending: dict[str, Any] = field(default_factory=dict)


class Stories:
    """A bounded number of stories. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stories: OrderedDict[str, Story] = OrderedDict()
        #: Of requests that run: the span, and when its phase began.
        self._spans: dict[str, tuple[Span, float]] = {}

    def begin(self, request: GenerationRequest, span: Span = NO_SPAN) -> None:
        """Begin the story of a request that arrived now.

        Args:
            span: The request's, for those of its phases.
        """
        params = request.kv_transfer_params or {}
        story = Story(request.request_id, _phase(params), time.time(), len(request.prompt_token_ids))
        if span is not NO_SPAN:
            span.set(request_id=request.request_id, phase=story.phase, prompt_tokens=story.num_prompt_tokens)
            self._spans[request.request_id] = (span, story.arrived)
        with self._lock:
            self._stories[request.request_id] = story
            if len(self._stories) > MAX_STORIES:
                self._stories.popitem(last=False)

    def note(self, request_id: str, name: str, at: float, details: Mapping[str, Any]) -> None:
        """Add an event. Requests whose story is not kept any more are ignored."""
        with self._lock:
            story = self._stories.get(request_id)
            if story is not None and len(story.events) < MAX_EVENTS:
                story.events.append({"at": at, "name": name, **details})

    def observe_handoffs(self, stats: KVConnectorStats) -> None:
        """Add what the connector reports of a step."""
        for event in stats.events:
            # The engine appends a number to the ids of requests, which makes them unique for the connector.
            self.note(event.request_id.rpartition("-")[0], event.name, event.at, event.details)

    def observe_output(self, request_id: str, output: RequestOutput) -> None:
        """Note a piece of the answer, if it is the first or the last one, or carries an offer."""
        now = time.time()
        if output.kv_transfer_params is not None:
            tokens = output.kv_transfer_params.get("remote_num_tokens", 0)
            self.note(request_id, "offer given to the router", now, {"tokens": tokens})
        with self._lock:
            story = self._stories.get(request_id)
            if story is None or (story.has_output and not output.finish_reason):
                return
            is_first = not story.has_output and bool(output.new_token_ids) and not output.is_known
            story.has_output = story.has_output or is_first
            if output.finish_reason:
                metrics = dataclasses.asdict(output.metrics)
                story.ending = {
                    "at": now,
                    "finish_reason": output.finish_reason,
                    "error": output.error,
                    "metrics": metrics,
                }
        if is_first:
            self.note(request_id, "first token", now, {})
            self._end_phase(request_id, now, _first_phase(output))
        if output.finish_reason:
            self.note(request_id, "finished", now, {"reason": output.error or output.finish_reason})
            self._end_phase(request_id, now, "kvferry.generate")
            self._end_request(request_id, output)

    def left(self, request_id: str) -> None:
        """Forget the span of a request whose answer nothing waits for any more."""
        self._spans.pop(request_id, None)

    def _end_phase(self, request_id: str, now: float, name: str) -> None:
        if (known := self._spans.get(request_id)) is not None:
            span, began = known
            span.child(name, at=began).end(at=now)
            self._spans[request_id] = (span, now)

    def _end_request(self, request_id: str, output: RequestOutput) -> None:
        if (known := self._spans.pop(request_id, None)) is not None:
            known[0].set(
                finish_reason=output.finish_reason or "",
                output_tokens=output.metrics.num_output_tokens,
                cached_tokens=output.metrics.num_cached_tokens,
                loaded_tokens=output.metrics.num_loaded_tokens,
            )
            if output.finish_reason == "error":
                known[0].fail(output.error)

    def find(self, wanted: str) -> list[dict[str, Any]]:
        """Return the stories of a request, oldest first.

        Args:
            wanted: The `X-Request-Id` that the client or the router sent, or the `id` of the answer.
        """
        with self._lock:
            found = [story for request_id, story in self._stories.items() if _is_of(request_id, wanted)]
            return [dataclasses.asdict(story) for story in found[-_MAX_FOUND:]]

    def latest(self) -> list[str]:
        """Return the ids of all stories, oldest first."""
        with self._lock:
            return list(self._stories)


def _first_phase(output: RequestOutput) -> str:
    """Name the time until the first token, queueing included: a node that loaded the prompt computed only its end."""
    return "kvferry.load_and_first_token" if output.metrics.num_loaded_tokens else "kvferry.prefill"


def _phase(params: Mapping[str, Any]) -> str:
    if params.get("do_remote_prefill"):
        return "decode"
    return "prefill" if params.get("do_remote_decode") else "alone"


def _is_of(request_id: str, wanted: str) -> bool:
    """Return whether a node's id, `cmpl-CLIENT-SUFFIX`, is that of the wanted request."""
    answered = request_id.rpartition("-")[0]
    return wanted in (request_id, answered, answered.partition("-")[2])
