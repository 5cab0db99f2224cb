"""What an answer's `usage` may say: the one owner of a request's token counts. Pure.

`cached_tokens` of a pair are the prompt tokens that no node had to compute for this request. They are the
longer of two prefixes: the one that the prefill node found in its cache, and the one that the decode node had
itself. The nodes report them in different ways. A reference node counts what it had itself, without what it
loaded, and says in a header how the load ended. A server of vLLM adds what it loaded.

Each endpoint has names of its own for the counts: see `UsageNames`.

What must never break: a count that is not known is left out, or is 0 where it may not be absent. No later
attempt raises it, because what one node has computed for a request, another node finds in a cache.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..http.sse import Event
from .dialects import Dialect, UsageNames

#: A node that counts more tokens than this in one answer does not tell the truth.
MAX_TOKENS = 10**9
_TOTAL = "total_tokens"
_PLAIN = Dialect()

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

    Args:
        dialect: Of the client and of all nodes.

    Attributes:
        num_left_out: Counts of nodes that cannot be true.
    """

    def __init__(self, dialect: Dialect = _PLAIN) -> None:
        self.num_left_out = 0
        self._names, self._first_events = dialect.usage, dialect.first_events
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
        self._attempt.found = _cached(self._checked(answer.get("usage")), self._names)
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
        return self.is_waiting and b'"usage"' in event.raw and self._is_last(event)

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
        # Servers of vLLM give details in the last event only.
        mended = self._mended(event.content, is_last=self._is_last(event))
        return event if mended is None else Event.of(mended, event.name)

    def _is_last(self, event: Event) -> bool:
        """Whether an event with a usage has the final counts."""
        return event.name not in self._first_events and not event.content.get("choices")

    def whole(self, payload: bytes, content: Mapping[str, Any]) -> bytes:
        """Return a whole answer for the client: the same bytes if nothing in it changes.

        Args:
            content: The payload, parsed.
        """
        mended = self._mended(content, is_last=True)
        return payload if mended is None else json.dumps(mended).encode()

    def _mended(self, content: Mapping[str, Any], *, is_last: bool) -> dict[str, Any] | None:
        """Return a part of an answer with a true usage. None: it is true already."""
        mended = self._mended_object(content, is_last=is_last)
        inner = content.get(self._names.inside)
        if isinstance(inner, dict) and (changed := self._mended_object(inner, is_last=is_last)) is not None:
            mended = {**(content if mended is None else mended), self._names.inside: changed}
        return mended

    def _mended_object(self, content: Mapping[str, Any], *, is_last: bool) -> dict[str, Any] | None:
        if (said := content.get("usage")) is None:
            return None
        if (usage := self._checked(said)) is None:
            return {key: value for key, value in content.items() if key != "usage"}
        if (own := _cached(usage, self._names)) is not None:
            self._attempt.own = own
        if is_last or own is not None:
            usage = self._with_cached(usage)
        return None if usage == said else {**content, "usage": usage}

    def _with_cached(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        names = self._names
        cached, num_prompt = self.cached_tokens, num_prompt_of(usage, names)
        if num_prompt is None:
            cached = None
        elif cached is not None and self._is_continued:
            # What the node has of the answer so far is no part of the prompt.
            cached = min(cached, num_prompt)
        elif cached is not None and cached > num_prompt:
            cached = None
            self.num_left_out += 1
        unknown = 0 if names.needs_details else None
        told = unknown if cached is None else cached
        if told == _cached(usage, names):
            return dict(usage)
        # How much of the prompt the decode node wrote into its own cache says nothing of the pair.
        changed = {names.cached: told, names.written: unknown, f"{names.cached}_per_turn": None}
        details = _details(usage, names)
        kept = {key: value for key, value in {**details, **changed}.items() if value is not None}
        if names.is_prompt_the_rest and num_prompt is not None:
            kept[names.prompt] = num_prompt - (told or 0)
        if not names.details:
            return kept
        rest = {key: value for key, value in usage.items() if key != names.details}
        return {**rest, names.details: kept} if kept else rest

    def _checked(self, said: object) -> dict[str, Any] | None:
        """Return a usage without what cannot be true, which is counted. None: it is no usage."""
        if not isinstance(said, dict):
            self.num_left_out += said is not None
            return None
        names = self._names
        usage = self._without_nonsense(said, (names.prompt, names.answer, _TOTAL))
        for name in filter(None, (names.details, names.answer_details)):
            if (details := usage.get(name)) is None:
                continue
            if not isinstance(details, dict):
                del usage[name]
                self.num_left_out += 1
                continue
            usage[name] = self._without_nonsense(
                details, [key for key in details if key.endswith("_tokens") and key != "multimodal_tokens"]
            )
        if not names.details:
            checked = self._without_nonsense(usage, (names.cached, names.written))
            if names.is_prompt_the_rest and checked != usage:
                checked.pop(names.prompt, None)  # it is the rest of what is not known
            usage = checked
        own, num_prompt = _cached(usage, names), num_prompt_of(usage, names)
        if own is not None and num_prompt is not None and own > num_prompt and not self._is_continued:
            del usage[names.details][names.cached]
            self.num_left_out += 1
        return usage

    def _without_nonsense(self, said: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        wrong = {name for name in names if said.get(name) is not None and count_of(said[name]) is None}
        self.num_left_out += len(wrong)
        return {key: value for key, value in said.items() if key not in wrong}


def usage_in(content: Mapping[str, Any], names: UsageNames) -> Mapping[str, Any]:
    """Return the usage of an answer or of one event of it, unchecked; empty if it has none."""
    inner = content.get(names.inside)
    usage = (inner if isinstance(inner, dict) else content).get("usage")
    return usage if isinstance(usage, dict) else {}


def num_prompt_of(usage: Mapping[str, Any], names: UsageNames) -> Count:
    """Return how many tokens a prompt has, those in a cache included."""
    counts = [usage.get(names.prompt)]
    if names.is_prompt_the_rest:
        counts += [usage[name] for name in (names.cached, names.written) if usage.get(name) is not None]
    return _sum(map(count_of, counts))


def _details(usage: Mapping[str, Any], names: UsageNames) -> Mapping[str, Any]:
    details: Mapping[str, Any] = (usage.get(names.details) or {}) if names.details else usage
    return details


def _cached(usage: Mapping[str, Any] | None, names: UsageNames = _PLAIN.usage) -> Count:
    cached: Count = _details(usage or {}, names).get(names.cached)
    return cached


def summed(answers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the usage of the answers to several prompts, which were mended before.

    A count that one of them lacks is left out, and so are details other than the cached tokens.
    """
    names = _PLAIN.usage  # only completions have several prompts
    usages = [usage_in(answer, names) for answer in answers]
    total = {name: _sum(usage.get(name) for usage in usages) for name in (names.prompt, names.answer, _TOTAL)}
    total = {name: count for name, count in total.items() if count is not None}
    cached = _sum(map(_cached, usages))
    return total if cached is None else {**total, names.details: {names.cached: cached}}


def _sum(counts: Iterable[Count]) -> Count:
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total
