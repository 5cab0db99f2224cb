"""Where a request's prompt is computed: at the node that answers, or at another one that hands its cache over.

Comes in: what each node has to do, what it has taken for that so far, and how much of the prompt it has cached. Goes out: one
node for the prompt, one for the answer, and the estimates behind the choice. Pure: the caller tells the time.

The arithmetic is in `docs/router.md`. What must never break: an estimate may be wrong, but never infinite or negative, so that no
node is shut out for ever by what it has once shown; and a decision takes one pass over the nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

#: What a first request is estimated with, before anything was seen: a small model on one core. Equal for all nodes, so only the
#: work that they have decides. A few requests outweigh it.
SECONDS_PER_TOKEN, HANDOVER_S, SECONDS_PER_HANDED_TOKEN = 1e-3, 0.02, 2e-5
#: The same for a step, by the number of answers that share it.
SECONDS_PER_STEP = ((1.0, 0.03), (8.0, 0.06))
#: Weight of that first guess, in prompt tokens, in steps, and in handed-over tokens.
GUESSED_TOKENS, GUESSED_STEPS, GUESSED_HANDED = 64.0, 4.0, 256.0
#: What a new measurement makes of the weight of the earlier ones.
FADING = 0.97
#: Tokens of an answer whose length nothing is known about.
ANSWER_TOKENS = 64.0
#: A measurement outside these is a clock's jump or a lie, and is cut off.
MIN_S, MAX_S = 1e-7, 600.0


class Rate:
    """Seconds per unit of work, of which later measurements count more.

    Args:
        seconds: Per unit, before the first measurement.
        weight: Units that this guess counts as.
    """

    __slots__ = ("_seconds", "_units")

    def __init__(self, seconds: float, weight: float) -> None:
        self._seconds, self._units = seconds * weight, weight

    @property
    def seconds(self) -> float:
        """Per unit."""
        return self._seconds / self._units

    def add(self, seconds: float, units: float) -> None:
        """Take in a measurement. One without work, or without a finite time, says nothing."""
        if units <= 0 or not math.isfinite(seconds):
            return
        seconds = min(max(seconds, MIN_S), MAX_S)
        self._seconds = self._seconds * FADING + seconds
        self._units = self._units * FADING + units


class Line:
    """Seconds as a straight line over a number, of which later measurements count more.

    Args:
        guesses: Points before the first measurement.
        weight: Measurements that each of them counts as.
    """

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y")

    def __init__(self, guesses: Sequence[tuple[float, float]], weight: float) -> None:
        self._n = self._x = self._xx = self._xy = self._y = 0.0
        for x, y in guesses:
            self._sum(x, y, weight)

    def add(self, x: float, seconds: float) -> None:
        """Take in a measurement. One without a finite time says nothing."""
        if not math.isfinite(seconds):
            return
        self._n, self._x, self._xx = self._n * FADING, self._x * FADING, self._xx * FADING
        self._xy, self._y = self._xy * FADING, self._y * FADING
        self._sum(x, min(max(seconds, MIN_S), MAX_S), 1.0)

    def _sum(self, x: float, y: float, weight: float) -> None:
        self._n += weight
        self._x += weight * x
        self._xx += weight * x * x
        self._xy += weight * x * y
        self._y += weight * y

    def at(self, x: float) -> float:
        """Return the seconds at `x`. The line never falls: more answers take no less time."""
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        slope = max(0.0, (self._xy / self._n - mean_x * mean_y) / spread) if spread > 1e-9 else 0.0
        return max(MIN_S, mean_y + slope * (x - mean_x))


@dataclass(eq=False)
class NodeLoad:
    """What a node has to do for this router, and what such work has taken there.

    Attributes:
        num_answers: Answers that it is giving.
        prompt: Seconds per prompt token.
        step: Seconds per token of an answer while no prompt is computed there, by the number of answers.
    """

    url: str
    num_answers: int = 0
    prompt: Rate = field(default_factory=lambda: Rate(SECONDS_PER_TOKEN, GUESSED_TOKENS))
    step: Line = field(default_factory=lambda: Line(SECONDS_PER_STEP, GUESSED_STEPS))
    # Tokens to be computed, and since when.
    _waiting: dict[int, tuple[int, float]] = field(default_factory=dict)
    _num_waiting: int = 0  # their tokens
    _number: int = 0
    _done_at: float = 0.0  # when it had computed its latest prompt

    @property
    def queue_s(self) -> float:
        """Until it has computed the prompts that it has."""
        return self._num_waiting * self.prompt.seconds

    def prompt_asked(self, num_tokens: int, now: float) -> int:
        """Note a prompt with the number of its tokens that are to be computed. Returns the prompt's number."""
        self._number += 1
        self._waiting[self._number] = num_tokens, now
        self._num_waiting += num_tokens
        return self._number

    def prompt_ended(self, number: int, now: float, *, is_computed: bool) -> None:
        """Note that a prompt is computed, or given up. Does nothing for one that is not under way."""
        if (known := self._waiting.pop(number, None)) is None:
            return
        num_tokens, asked_at = known
        self._num_waiting -= num_tokens
        if is_computed:
            # It waited for the one before it.
            self.prompt.add(now - max(asked_at, self._done_at), num_tokens)
            self._done_at = now

    def step_taken(self, seconds: float) -> None:
        """Note the time between two tokens of one answer, unless a prompt that was computed meanwhile explains it."""
        if not self._waiting:
            self.step.add(self.num_answers, seconds)


@dataclass(frozen=True)
class Limits:
    """What a user wants kept; 0: nothing."""

    ttft_s: float = 0.0
    itl_s: float = 0.0


@dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        num_tokens: Of the prompt.
        num_answer_tokens: At most; 0: not known.
        cached: URL of a node → tokens of the prompt that it probably has cached.
    """

    num_tokens: int
    num_answer_tokens: int = 0
    cached: Mapping[str, int] = field(default_factory=dict)

    def num_missing(self, node: NodeLoad) -> int:
        """Tokens of the prompt that a node would compute. The last one always is."""
        return max(1, self.num_tokens - self.cached.get(node.url, 0))


@dataclass(frozen=True)
class Choice:
    """Where a request goes, and the estimates behind that, in seconds.

    Attributes:
        prefill: Computes the prompt. The same as `decode`: nothing is handed over.
        ttft_s: Until the answer begins.
        others_s: Added to other answers and prompts, summed over them.
        alternative_s: The total of the best choice of the other kind; infinite if there is none.
    """

    prefill: NodeLoad
    decode: NodeLoad
    ttft_s: float
    others_s: float
    num_missed: int
    total_s: float
    alternative_s: float = math.inf

    @property
    def is_local(self) -> bool:
        return self.prefill is self.decode

    def __str__(self) -> str:
        way = "local" if self.is_local else "handover"
        return (
            f"{way}; ttft={self.ttft_s:.3f}; others={self.others_s:.3f}; alternative={self.alternative_s:.3f}"
        )


def choose(
    ask: Ask,
    prefills: Sequence[NodeLoad],
    decodes: Sequence[NodeLoad],
    handover: Callable[[NodeLoad, NodeLoad], Rate],
    limits: Limits,
    *,
    may_be_local: bool = True,
    may_hand_over: bool = True,
) -> Choice | None:
    """Choose the nodes for a request, by the fewest missed limits, then by the least time added to everyone.

    Args:
        prefills, decodes: The nodes that may compute its prompt, and those that may answer it. A node may be in both.
        handover: Seconds per token, for a pair of nodes.

    Returns:
        None if there is no such pair.
    """
    pairs: list[tuple[NodeLoad, NodeLoad, float]] = []
    if may_be_local:
        able = {id(node) for node in prefills}
        own = [node for node in decodes if id(node) in able]
        if own:
            node = min(own, key=lambda node: _rank(ask, node, node, 0.0, limits))
            pairs.append((node, node, 0.0))
    if may_hand_over and prefills and decodes:
        # A handover's cost hardly depends on the pair, so each end is chosen by itself: one pass over the nodes, not their square.
        prefill = min(prefills, key=lambda node: node.queue_s + _prompt_s(ask, node) * (1 + node.num_answers))
        if others := [node for node in decodes if node is not prefill]:
            decode = min(others, key=lambda node: _steps_s(ask, node) + node.queue_s)
            pairs.append((prefill, decode, HANDOVER_S + handover(prefill, decode).seconds * ask.num_tokens))
    if not pairs:
        return None
    choices = [Choice(pair[0], pair[1], *_rated(ask, *pair, limits)) for pair in pairs]
    chosen, *rest = sorted(choices, key=lambda each: (each.num_missed, each.total_s))
    return replace(chosen, alternative_s=rest[0].total_s) if rest else chosen


def _rank(
    ask: Ask, prefill: NodeLoad, decode: NodeLoad, handover_s: float, limits: Limits
) -> tuple[int, float]:
    return _rated(ask, prefill, decode, handover_s, limits)[2:]


def _prompt_s(ask: Ask, node: NodeLoad) -> float:
    return ask.num_missing(node) * node.prompt.seconds


def _steps_s(ask: Ask, node: NodeLoad) -> float:
    """What the steps of an answer take, and what it adds to those of the node's other answers."""
    num_steps = ask.num_answer_tokens or ANSWER_TOKENS
    before, after = node.step.at(node.num_answers), node.step.at(node.num_answers + 1)
    return num_steps * (after + node.num_answers * (after - before))


def _rated(
    ask: Ask, prefill: NodeLoad, decode: NodeLoad, handover_s: float, limits: Limits
) -> tuple[float, float, int, float]:
    """Return the estimates of a `Choice`: time until the answer begins, what is added to others, missed limits, and the total."""
    num_answers = decode.num_answers
    prompt_s, step_s = _prompt_s(ask, prefill), decode.step.at(num_answers + 1)
    ttft_s = prefill.queue_s + prompt_s + handover_s + step_s
    # Each answer of the node that computes the prompt pauses meanwhile, and so does this one for the prompts of its own node.
    others_s = prefill.num_answers * prompt_s
    pause_s = decode.queue_s if prefill is not decode else 0.0
    longest_s = max(pause_s, prompt_s if prefill.num_answers else 0.0, step_s)
    num_missed = int(0 < limits.ttft_s < ttft_s) + int(0 < limits.itl_s < longest_s)
    return ttft_s, others_s, num_missed, ttft_s + others_s + pause_s + _steps_s(ask, decode)
