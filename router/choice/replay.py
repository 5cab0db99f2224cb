"""Let several fleets know the same requests: each tells the steps of its own, and replays those of others.

The same code makes the same state of the same steps, so nothing of the state itself is told. Pure.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from .fleet import Fleet, Progress

#: Seconds between two steps that tell tokens of the same answer. Replaying each token would cost every other
#: process a tenth of what the token itself costs.
TOKENS_S: Final = 0.25
#: Steps of a request that are told to a process that has just started: the latest ones. Without earlier ones
#: the state is the same, because each step first ends what the one before it began.
MAX_STEPS: Final = 16

#: The step before the first one: its details are the size of the prompt and its keys.
BEGINS: Final = "begins"

#: The request's number, the name of the step, when it was, and its details.
Step = list[Any]


@dataclass
class _Told:
    begins: Step
    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    num_tokens: int = 0  # that came and were not told
    tokens_at: float = 0.0  # when some were told last


class Teller:
    """Notes the steps of a fleet's own requests.

    Args:
        tell: Called with each step.
        tokens_s: Seconds for which tokens of an answer are summed up.
    """

    def __init__(self, fleet: Fleet, tell: Callable[[Step], None], tokens_s: float = TOKENS_S) -> None:
        self._tell, self._tokens_s = tell, tokens_s
        self._numbers = itertools.count(1)
        self._live: dict[Progress, _Told] = {}
        fleet.on_step = self._note

    def state(self) -> list[Step]:
        """Return the steps by which another fleet learns of the requests that have not ended.

        Without the prompts' keys: those of a thousand long prompts would fill a frame, and they only say what
        nodes have cached.
        """
        return [step for told in self._live.values() for step in ([*told.begins[:-1], []], *told.steps)]

    def _note(self, progress: Progress, name: str, now: float, details: tuple[Any, ...]) -> None:
        told = self._live.get(progress)
        if told is None:
            if name not in ("prompt_asked", "answer_began"):
                return  # nothing was asked of a node yet
            begins = [next(self._numbers), BEGINS, now, progress.num_tokens, progress.keys]
            told = self._live[progress] = _Told(begins)
            self._tell(begins)
        number = told.begins[0]
        step = [number, name, now, *details]
        if name != "tokens_came":
            told.steps.append(step)
            self._tell(step)
            if name == "ended":
                del self._live[progress]
            return
        # One step for a process that starts: the mean time of a token is right.
        if told.steps and told.steps[-1][1] == name:
            told.steps[-1] = [number, name, now, told.steps[-1][3] + details[0]]
        else:
            told.steps.append(step)
        told.num_tokens += details[0]
        if now - told.tokens_at >= self._tokens_s:
            self._tell([number, name, now, told.num_tokens])
            told.num_tokens, told.tokens_at = 0, now


class Mirrors:
    """The requests of other fleets, replayed into this one."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._of: dict[int, dict[int, Progress]] = {}  # by worker and number

    def begin(self, worker: int, state: Iterable[Step]) -> None:
        """Replay the requests that a worker has."""
        self.end(worker)
        for step in state:
            self.take(worker, step)

    def take(self, worker: int, step: Step) -> None:
        """Replay a step of a worker."""
        number, name, now, *details = step
        mirrors = self._of.setdefault(worker, {})
        if name == BEGINS:
            mirrors[number] = Progress.mirror(self._fleet, *details)
        elif number in mirrors:
            mirrors[number].replay(name, now, details)
            if name == "ended":
                del mirrors[number]

    def end(self, worker: int) -> None:
        """End all requests of a worker."""
        for mirror in self._of.pop(worker, {}).values():
            mirror.replay("ended", self._fleet.clock(), ())
