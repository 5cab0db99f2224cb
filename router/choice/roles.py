"""How many nodes are kept for prompts: the slow decision of a placement.

Comes in: when requests came lately and how long they were, and what prompts and steps take. Goes out: a
number of nodes at which no answer should be given while others have room. With 0 each node does both, and
nothing is handed over. Pure: the caller tells the time.

For each number the share of the latest requests is estimated that would be late with it, from what queues do
on average: prompts wait at the nodes that compute them, and answers share a step. Where a node does both,
each prompt pauses its answers. The arithmetic is in `docs/router-design.md`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from .estimates import ALIKE, LATELY_S, MIN_S, SURELY_KEPT, WEIGHT, Line, chance_of_more, chance_to_miss

#: Nodes are kept before they have to be, because answers that began at them stay for long. If none and some
#: do as well now, that decides which would be better at this multiple of the rate.
GROWTH = 3.0
#: Requests that the estimate is made of at most.
NUM_RECENT = 2048
#: So many must have come before anything is decided.
NUM_FIRST = 8
#: Seconds between two decisions.
DECIDE_S = 1.0
#: Of those requests, how many are judged, and about how many numbers are tried: a decision takes about 2 ms.
NUM_JUDGED, NUM_TRIED = 64, 16
#: Bounds of the estimates, so that they stay finite: a step's length in limits, and the use of a queue.
MOST_LIMITS, FULLEST = 10.0, 0.98


class Recent(NamedTuple):
    """A request that came lately.

    Attributes:
        num_missing: Tokens of its prompt that its node had to compute, of `num_tokens`.
        num_steps: Tokens of its answer.
    """

    at: float
    num_missing: int
    num_tokens: int
    num_steps: float


class Times(NamedTuple):
    """What work takes, and what it should take at most, in seconds.

    Attributes:
        prompt: Of a prompt by its tokens, at a node that gives no answer.
        step: Of a step by its answers.
        ttft_limit_s: The limit of a first token is this, plus `ttft_limit_times` what the prompt takes.
        handover_s: Of handing a prompt over.
    """

    prompt: Line
    step: Line
    itl_limit_s: float
    ttft_limit_s: float
    ttft_limit_times: float
    handover_s: float


class Roles:
    """Decides how many nodes are kept for prompts.

    Attributes:
        num: The latest decision.
        mean_missing: Tokens to compute of a prompt that was asked for lately.
    """

    def __init__(self) -> None:
        self.num, self.mean_missing = 0, 0.0
        self._recent: deque[Recent] = deque()
        self._num_missing = 0  # of these; every estimate of a queue may ask, so it is not added up then
        self._decided_at = -math.inf

    def note(self, request: Recent) -> None:
        """Note a request whose prompt a node is to compute."""
        self._recent.append(request)
        self._num_missing += request.num_missing
        self._forget(request.at)
        self.mean_missing = self._num_missing / len(self._recent)

    def _forget(self, now: float) -> None:
        recent = self._recent
        while len(recent) > NUM_RECENT or (len(recent) > NUM_FIRST and recent[0].at < now - LATELY_S):
            self._num_missing -= recent.popleft().num_missing

    def are_due(self, now: float) -> bool:
        """Return whether it is time to decide."""
        return now - self._decided_at >= DECIDE_S and len(self._recent) >= NUM_FIRST

    def decide(self, now: float, num_nodes: int, times: Times, share: float = 1.0) -> int:
        """Decide how many of the nodes are to be kept for prompts, and return it.

        Args:
            share: Of all requests at the nodes, those that were noted here.
        """
        self._decided_at = now
        self._forget(now)
        costs = self.costs(now, num_nodes, times, share)
        # A change of roles pauses answers, so it must be worth it.
        kept = min(filter(None, costs), key=costs.__getitem__, default=0)
        if self.num and costs.get(self.num, math.inf) <= costs[kept] + ALIKE:
            kept = self.num
        gain = costs[0] - costs[kept]
        if abs(gain) <= ALIKE:
            grown = self.costs(now, num_nodes, times, share / GROWTH, {0, kept})
            gain = grown[0] - grown[kept]
        self.num = kept if gain > (-ALIKE if self.num else ALIKE) else 0
        return self.num

    def costs(
        self, now: float, num_nodes: int, times: Times, share: float, only: AbstractSet[int] = frozenset()
    ) -> Mapping[int, float]:
        """Return the share of the requests that would be late, and a little for what is in use, by the number
        of nodes that are kept for prompts: `only` these, or about `NUM_TRIED`.
        """
        # Until now and not until the latest one, so that the rate falls when requests stop coming.
        rate = len(self._recent) / max(MIN_S, now - self._recent[0].at) / share
        own = [times.prompt.at(each.num_missing) for each in self._recent]
        mean, square = sum(own) / len(own), sum(each * each for each in own) / len(own)
        num_steps = sum(each.num_steps for each in self._recent) / len(own)
        judged = list(zip(own, self._recent, strict=True))[:: -(-len(own) // NUM_JUDGED)]
        start, limit_s, most_s = times.step.start, times.itl_limit_s, MOST_LIMITS * times.itl_limit_s
        # A prompt pauses the answers of its node for what it takes beside a step that they have anyway.
        pause_s = max(MIN_S, mean - start)
        costs: dict[int, float] = {}
        tried = {*range(0, num_nodes, -(-num_nodes // NUM_TRIED)), self.num - 1, self.num, self.num + 1}
        for num in sorted(only or tried & {*range(num_nodes)}):
            num_answering = num_nodes - num
            # Of each second at a node: what tokens take beside their steps, and what prompts do.
            tokens = times.step.slope * rate * num_steps / num_answering
            used = rate * mean / num if num else rate * pause_s / num_nodes
            left = 1 - tokens - (0.0 if num else used)
            itl_s = min(start / left, most_s) if left > 0 else most_s
            step_s = itl_s if num else start + tokens * itl_s  # without the pauses
            # The rest of the prompt that is being computed is the mean square by twice the mean. With several
            # nodes the chance to wait at all is Sakasegawa's approximation.
            if num:
                waits = min(1.0, used ** math.sqrt(2 * (num + 1)))
                queue_s = square / (2 * mean) / (num * max(1 - FULLEST, 1 - used))
                before_s = times.handover_s + 1.5 * step_s
            else:
                waits = min(1.0, used)
                queue_s = square / (2 * mean) / max(1 - FULLEST, 1 - used - tokens)
                before_s = 1.5 * step_s - start  # the rest of the present step, and the answers in its own
            # Where too many answers come, only those are late that do not fit in.
            room = max(MIN_S, 1 - start / max(MIN_S, limit_s))
            is_slow = min(chance_to_miss(step_s, limit_s), max(WEIGHT, beyond(tokens / room)))
            num_late = 0.0
            for prompt_s, each in judged:
                spare_s = times.ttft_limit_s + times.ttft_limit_times * times.prompt.at(each.num_tokens)
                spare_s -= before_s + prompt_s
                waits_long = waits * math.exp(-spare_s / queue_s) if spare_s > 0 else 1.0
                is_paused = is_slow
                if not num and each.num_steps > 1 and step_s < limit_s:
                    num_prompts = rate / num_nodes * each.num_steps * itl_s  # that come during the answer
                    bearable = (each.num_steps - 1) * (limit_s - step_s) / pause_s
                    is_paused = max(is_paused, chance_of_more(num_prompts, bearable))
                num_late += 1 - (1 - waits_long) * (1 - is_paused)
            late = max(num_late / len(judged), beyond(used) if num else 0.0)
            # Of numbers that keep all limits, the one that leaves most room is best.
            costs[num] = late + WEIGHT * max(used, min(3.0, step_s / limit_s))
        return costs


def beyond(use: float) -> float:
    """Return the share of work that comes beside what can be done, if as much comes as `use` of that.

    The estimate is as uncertain as that of a limit; see `SURELY_KEPT`.
    """
    most = 2 - SURELY_KEPT
    if use >= most:
        return 1 - 1 / use
    return (1 - 1 / most) * (max(0.0, use - SURELY_KEPT) / (most - SURELY_KEPT)) ** 2
