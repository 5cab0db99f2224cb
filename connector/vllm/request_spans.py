"""When vLLM's scheduler did what with each of its latest requests, for `kvferry explain`.

The spans of one request follow each other, and `node` is around them:

    queue       from its arrival in vLLM's front end until it has blocks
    prefill     from then until its first token, if this node computes the prompt
    load_wait   from then until its load has ended
    first_step  from then until its first token
    generate    the rest

vLLM tells a connector nothing of tokens. The first one is seen at the begin of the next step, or of the one
after that if vLLM schedules ahead.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..spans import RecentSpans, Span, SpanRecord
from ..stats import TransferRecord


@dataclass
class _Followed:
    """A request that has not ended.

    Attributes:
        request: vLLM's.
        node: The span of all of it.
        phase: The span of what it does now.
        num_cached_tokens: Prompt tokens that the node's own prefix cache had.
    """

    request: Any
    node: Span
    phase: Span
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0

    def go_on(self, name: str) -> None:
        now = time.time()
        self.phase.end(now)
        self.phase = self.node.child(name, now)
        if name == "generate":
            self.phase.set(first_token_s=now - self.request.arrival_time)


class RequestSpans:
    """Follows requests from their arrival until their end. Only vLLM's scheduler calls it."""

    def __init__(self) -> None:
        self._ended = RecentSpans()
        # vLLM ends each request that it has taken up once, also one that is aborted, so these are its
        # requests at most.
        self._followed: dict[str, _Followed] = {}
        self._without_token: dict[str, _Followed] = {}  # a part of them, so that a step need not look at all

    def __len__(self) -> int:
        return len(self._followed)

    def find(self, wanted: str) -> tuple[SpanRecord, ...]:
        """Return the spans of a request that have ended; see `RecentSpans.find`."""
        return self._ended.find(wanted)

    def keep(self, span: SpanRecord, client_request_id: str) -> None:
        """Keep a span of the worker half as well."""
        self._ended.keep(span, client_request_id)

    def arrived(self, request: Any, client_request_id: str, traceparent: str) -> None:
        """Note a request that vLLM's scheduler has taken up."""
        at = request.arrival_time
        node = Span("node", self._ended.keep, client_request_id, at=at, traceparent=traceparent)
        followed = _Followed(request, node, node.child("queue", at))
        self._followed[request.request_id] = self._without_token[request.request_id] = followed

    def found(self, request_id: str, num_cached_tokens: int) -> None:
        """Note what a request that waits for blocks has in the prefix cache."""
        followed = self._without_token.get(request_id)
        if followed is not None and followed.phase.name == "queue":
            followed.num_cached_tokens = num_cached_tokens

    def allocated(self, request_id: str, num_external_tokens: int) -> None:
        """Note that a request has blocks.

        After a load vLLM calls once more, and after a preemption it begins anew.
        """
        if (followed := self._without_token.get(request_id)) is None:
            return  # preempted after its first token: that is over
        followed.num_loaded_tokens += num_external_tokens
        if num_external_tokens:
            followed.go_on("load_wait")
        elif followed.phase.name == "queue":
            followed.go_on("prefill")

    def loaded(self, records: Iterable[TransferRecord]) -> None:
        """Note what loads have cost, one record per rank. They come no later than the end of the load."""
        of_requests: defaultdict[str, list[TransferRecord]] = defaultdict(list)
        for record in records:
            of_requests[record.request_id].append(record)
        for request_id, ranks in of_requests.items():
            followed, figures = self._without_token.get(request_id), TransferRecord.joined(ranks)
            if followed is not None and followed.phase.name == "load_wait":
                followed.phase.set(
                    transport=figures.transport,
                    mechanism=figures.mechanism,
                    reason=figures.reason,
                    bytes=figures.num_bytes,
                    seconds=figures.seconds,
                    exposed_seconds=figures.exposed_seconds,
                    sums=figures.sums,
                )

    def load_ended(self, request_id: str, error: str) -> None:
        """Note the end of a load. A text says why it failed."""
        followed = self._without_token.get(request_id)
        if followed is None or followed.phase.name != "load_wait":
            return
        if error:
            followed.num_loaded_tokens = 0
            followed.phase.fail(error)
        followed.go_on("prefill" if error else "first_step")

    def step_begins(self) -> None:
        """Note the requests whose first token an earlier step has given."""
        told = [name for name, each in self._without_token.items() if each.request.num_output_tokens]
        for request_id in told:
            self._without_token.pop(request_id).go_on("generate")

    def finished(self, request: Any, reason: str) -> None:
        """Note the end of a request."""
        self._without_token.pop(request.request_id, None)
        if (followed := self._followed.pop(request.request_id, None)) is None:
            return
        # The only token of a prefill comes with the end, and no step follows in which it would be seen.
        if followed.phase.name != "generate" and request.num_output_tokens:
            followed.go_on("generate")
        followed.phase.set(
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=followed.num_cached_tokens,
            loaded_tokens=followed.num_loaded_tokens,
            output_tokens=request.num_output_tokens,
            finish_reason=reason,
        )
        followed.phase.end()
        followed.node.end()
