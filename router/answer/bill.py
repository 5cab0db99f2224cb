"""What an answer's `usage` may say: the one owner of a request's token counts. Pure.

`cached_tokens` of a pair are the prompt tokens that no node had to compute for this request. They are the
longer of two prefixes: the one that the prefill node found in its cache, and the one that the decode node had
itself. The nodes report them in different ways. A reference node counts what it had itself, without what it
loaded, and says in a header how the load ended. A server of vLLM adds what it loaded.

What must never break: a count that is not known is left out, and no later attempt raises it, because what one
node has computed for a request, another node finds in a cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..http.sse import Event

#: A node that counts more tokens than this in one answer does not tell the truth.
MAX_TOKENS = 10**9
_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
_DETAILS = ("prompt_tokens_details", "completion_tokens_details")

#: How the load of a cache ended, as reference nodes say it; `unsaid` by all others.
Loaded = Literal["loaded", "failed", "none", "unsaid"]
#: A number of tokens; None: it is not known.
Count = int | None


def count_of(value: object) -> Count:
    """Return a number of tokens. None: the value is none that can be true."""
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None


def least(counts: Iterable[Count]) -> Count:
    """Return the smallest of some counts. None if it is not known; nothing is smaller than 0."""
    found = list(counts)
    smallest = min((one for one in found if one is not None), default=None)
    return None if None in found and smallest != 0 else smallest


@dataclass(slots=True)
class _Attempt:
    """What is known of one way of the prompt to an answer.

    Attributes:
        at: Where its cache comes from: computed by a prefill node, moved with an answer that another node
            has begun, or computed by the node that answers.
        found: What the prefill node found in its cache.
        is_waiting: The prefill node has not answered yet.
        loaded: None: the decode node has not answered.
        adds_loads: The decode node is a server of vLLM.
        computes_again: It may have computed what it could not load, without saying so.
        own: What the decode node counts.
    """

    at: Literal["prefill", "moved", "alone"] = "alone"
    found: Count = None
    is_waiting: bool = False
    loaded: Loaded | None = None
    adds_loads: bool = False
    computes_again: bool = False
    own: Count = None

    def counts(self) -> Iterable[Count]:
        """Yield counts of which the smallest is this attempt's; none if it has computed nothing."""
        if self.loaded is None:
            if self.at == "prefill":
                yield self.found
        elif self.at == "alone" or self.loaded in ("failed", "none"):
            yield self.own
        elif self.loaded == "loaded":
            if self.at == "prefill":
                yield self.found if None in (self.found, self.own) else max(self.found or 0, self.own or 0)
        elif not self.adds_loads:
            yield None
        else:
            if self.at == "prefill":
                yield self.found
            # After a load that failed it counts what it had, which may be less.
            if self.own is not None or self.computes_again:
                yield self.own


class Bill:
    """The token counts of one request, over all attempts to answer it.

    Attributes:
        num_left_out: Counts of nodes that cannot be true.
    """

    def __init__(self) -> None:
        self.num_left_out = 0
        self._attempt = _Attempt()
        self._before: list[Count] = []  # the least of all earlier attempts
        self._is_continued = False

    # -- what happens --------------------------------------------------------------------------------

    def begins(self, at: Literal["prefill", "moved", "alone"]) -> None:
        """Begin another attempt."""
        if counts := [*self._before, *self._attempt.counts()]:
            self._before = [least(counts)]
        self._attempt = _Attempt(at, is_waiting=at == "prefill")

    def lost(self) -> None:
        """Note that a node was lost with the request: what it had computed is not known.

        A prefill node that has answered has said it.
        """
        if self._attempt.at == "alone" or self._attempt.is_waiting:
            self._before = [least([*self._before, None])]

    def no_prefill(self) -> None:
        """Note that the prefill node has computed nothing; one that has answered has."""
        if self._attempt.is_waiting:
            self._attempt = _Attempt()

    def prefilled(self, answer: Mapping[str, Any]) -> None:
        """Take in the answer of a prefill node."""
        self._attempt.found = _cached(self._checked(answer.get("usage")))
        self._attempt.is_waiting = False

    def answered(self, loaded: Loaded, *, adds_loads: bool, computes_again: bool, is_continued: bool) -> None:
        """Note that a decode node answers.

        Args:
            adds_loads: It is a server of vLLM.
            computes_again: It may compute what it cannot load, without saying so.
            is_continued: It goes on with an answer, so its prompt may be longer than the client's.
        """
        attempt = self._attempt
        attempt.loaded, attempt.adds_loads, attempt.computes_again = loaded, adds_loads, computes_again
        self._is_continued = is_continued

    def heard(self, event: Event) -> None:
        """Take in the end of a reference node's answer, after which its usage may never come."""
        if b'"num_cached_tokens"' in event.raw and isinstance(figures := event.content.get("metrics"), dict):
            self._attempt.own = count_of(figures.get("num_cached_tokens"))

    # -- the client's answer -------------------------------------------------------------------------

    @property
    def cached_tokens(self) -> Count:
        """Prompt tokens that no node had to compute, as far as it is known now."""
        counts = [*self._before, *self._attempt.counts()]
        return least(counts) if counts else None

    def awaits_prefill(self, event: Event) -> bool:
        """Whether the counts at the end of a stream need what the prefill node has yet to say."""
        return self.is_waiting and b'"usage"' in event.raw and not event.content.get("choices")

    @property
    def is_waiting(self) -> bool:
        """Whether the count depends on what the prefill node has yet to say."""
        attempt = self._attempt
        is_found_needed = attempt.loaded == "loaded" or (attempt.loaded == "unsaid" and attempt.adds_loads)
        return attempt.is_waiting and is_found_needed

    def event(self, event: Event) -> Event:
        """Return an event for the client: the same if nothing in it changes."""
        if b'"usage"' not in event.raw:
            return event
        # Servers of vLLM give details in the last event only, which has no choices.
        mended = self._mended(event.content, is_last=not event.content.get("choices"))
        return event if mended is None else Event.of(mended)

    def whole(self, payload: bytes, content: Mapping[str, Any]) -> bytes:
        """Return a whole answer for the client: the same bytes if nothing in it changes.

        Args:
            content: The payload, parsed.
        """
        mended = self._mended(content, is_last=True)
        return payload if mended is None else json.dumps(mended).encode()

    def _mended(self, content: Mapping[str, Any], *, is_last: bool) -> dict[str, Any] | None:
        """Return a part of an answer with a true usage. None: it is true already."""
        if (said := content.get("usage")) is None:
            return None
        rest = {key: value for key, value in content.items() if key != "usage"}
        if (usage := self._checked(said)) is None:
            return rest
        if (own := _cached(usage)) is not None:
            self._attempt.own = own
        if is_last or usage.get("prompt_tokens_details"):
            usage = self._with_cached(usage)
        return None if usage == said else {**rest, "usage": usage}

    def _with_cached(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        cached, num_prompt = self.cached_tokens, usage.get("prompt_tokens")
        if num_prompt is None:
            cached = None
        elif cached is not None and self._is_continued:
            # What the node has of the answer so far is no part of the prompt.
            cached = min(cached, num_prompt)
        elif cached is not None and cached > num_prompt:
            cached = None
            self.num_left_out += 1
        details = usage.get("prompt_tokens_details") or {}
        if cached == details.get("cached_tokens"):
            return dict(usage)
        # How much of the prompt the decode node wrote into its own cache says nothing of the pair.
        changed = {"cached_tokens": cached, "created_cache_tokens": None}
        kept = {key: value for key, value in {**details, **changed}.items() if value is not None}
        rest = {key: value for key, value in usage.items() if key != "prompt_tokens_details"}
        return {**rest, "prompt_tokens_details": kept} if kept else rest

    def _checked(self, said: object) -> dict[str, Any] | None:
        """Return a usage without what cannot be true, which is counted. None: it is no usage."""
        if not isinstance(said, dict):
            self.num_left_out += said is not None
            return None
        usage = self._without_nonsense(said, _COUNTS)
        for name in _DETAILS:
            if (details := usage.get(name)) is None:
                continue
            if not isinstance(details, dict):
                del usage[name]
                self.num_left_out += 1
                continue
            usage[name] = self._without_nonsense(
                details, [key for key in details if key.endswith("_tokens") and key != "multimodal_tokens"]
            )
        own, num_prompt = _cached(usage), usage.get("prompt_tokens")
        if own is not None and num_prompt is not None and own > num_prompt and not self._is_continued:
            del usage["prompt_tokens_details"]["cached_tokens"]
            self.num_left_out += 1
        return usage

    def _without_nonsense(self, said: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        wrong = {name for name in names if said.get(name) is not None and count_of(said[name]) is None}
        self.num_left_out += len(wrong)
        return {key: value for key, value in said.items() if key not in wrong}


def _cached(usage: Mapping[str, Any] | None) -> Count:
    details = (usage or {}).get("prompt_tokens_details") or {}
    cached: Count = details.get("cached_tokens")
    return cached


def summed(answers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the usage of the answers to several prompts, which were mended before.

    A count that one of them lacks is left out, and so are details other than the cached tokens.
    """
    usages = [usage if isinstance(usage := answer.get("usage"), dict) else {} for answer in answers]
    total = {name: _sum(usage.get(name) for usage in usages) for name in _COUNTS}
    total = {name: count for name, count in total.items() if count is not None}
    cached = _sum(map(_cached, usages))
    return total if cached is None else {**total, "prompt_tokens_details": {"cached_tokens": cached}}


def _sum(counts: Iterable[Count]) -> Count:
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total
