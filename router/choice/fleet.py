"""What the router knows of the work at its nodes, for `placement`: it notes each request's way through them,
and learns from it.

`Fleet` owns the loads and forgets those of processes that have ended. `Progress` is one request's part of
them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal

from ..nodes.states import Occupancy
from .estimates import Rate
from .placement import (
    GUESSED_HANDED,
    SECONDS_PER_HANDED_TOKEN,
    Ask,
    Choice,
    Limits,
    NodeLoad,
    Pace,
    Work,
    choose,
)
from .prefixes import Prefixes

Mode = Literal["auto", "never", "always"]
#: Nodes, and pairs of nodes, that are remembered. A request that ends after its node has gone would keep that
#: one for ever.
MAX_NODES = MAX_PAIRS = 4096
#: A client may write any number as the limit of an answer.
MAX_ANSWER_TOKENS = 1_000_000
#: The fields in which the endpoints have what limits an answer, and the prompt.
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
PROMPTS = ("messages", "prompt", "input", "token_ids")
#: Of text in most languages.
BYTES_PER_TOKEN = 4


class Fleet:
    """The loads of all nodes.

    Args:
        mode: `never` hands nothing over between nodes that do both, `always` hands every prompt over.
        clock: Seconds of any clock that does not jump.

    Attributes:
        on_step: Called with each step of a request of this process: its progress, the step's name, the time,
            and what `Progress.replay` needs.
    """

    def __init__(self, mode: Mode, limits: Limits, clock: Callable[[], float]) -> None:
        self.mode, self.limits, self.clock = mode, limits, clock
        self.on_step: Callable[[Progress, str, float, tuple[Any, ...]], None] = lambda *step: None
        self.prefixes = Prefixes()
        self._pace = Pace()
        self._loads: dict[str, NodeLoad] = {}
        self._handovers: dict[tuple[str, str], Rate] = {}

    def load(self, url: str) -> NodeLoad:
        """Return the load of a node."""
        if url not in self._loads:
            while len(self._loads) >= MAX_NODES:
                del self._loads[next(iter(self._loads))]
            self._loads[url] = NodeLoad(url, self._pace)
        return self._loads[url]

    def note_all(self, url: str, occupancy: Occupancy) -> None:
        """Note what a node says that it has to do for all its clients."""
        self.load(url).note_all(occupancy.num_running, occupancy.num_waiting)

    def handover(self, prefill: NodeLoad, decode: NodeLoad) -> Rate:
        """Return what handing over has taken between two nodes, in seconds per token."""
        pair = prefill.url, decode.url
        if pair not in self._handovers:
            while len(self._handovers) >= MAX_PAIRS:
                del self._handovers[next(iter(self._handovers))]
            self._handovers[pair] = Rate(SECONDS_PER_HANDED_TOKEN, GUESSED_HANDED)
        return self._handovers[pair]

    def forget(self, url: str) -> None:
        """Forget a node whose process has ended: the next one may be another machine's, and has cached
        nothing.
        """
        self._loads.pop(url, None)
        self.prefixes.forget(url)
        self._handovers = {pair: rate for pair, rate in self._handovers.items() if url not in pair}

    def choose(
        self,
        progress: Progress,
        prefills: Mapping[str, int],
        decodes: Mapping[str, int],
        *,
        may_be_local: bool = True,
        may_hand_over: bool = True,
    ) -> Choice | None:
        """Choose the nodes for a request; None if there is none for its prompt, or none for its answer.

        Args:
            prefills, decodes: URLs of the nodes that may compute its prompt, and of those that may answer it.
                The values say how bad each node is to choose; see `NodeLoad`.
            may_be_local, may_hand_over: Ways that there are. Where they leave no pair, neither they nor the
                mode restrict the choice: nodes with one role always hand over, and a single node never does.
        """
        if not prefills or not decodes:
            return None
        able, answering = ([self.load(url) for url in nodes] for nodes in (prefills, decodes))
        for load, trouble in zip(able, prefills.values(), strict=True):
            load.prompt_trouble = trouble
        for load, trouble in zip(answering, decodes.values(), strict=True):
            load.answer_trouble = trouble
        may_be_local &= self.mode != "always"
        may_hand_over &= self.mode != "never"
        rate = partial(
            choose,
            progress.ask(),
            able,
            answering,
            self.handover,
            # Before anything was measured, a limit that the guess misses would send every request to the
            # longest queue.
            self.limits if self._pace.is_known else Limits(),
            self.clock(),
        )
        with progress.left_out():
            progress.choice = rate(may_be_local=may_be_local, may_hand_over=may_hand_over) or rate()
        return progress.choice


class Progress:
    """One request on its way, and what the nodes have to do for it.

    Attributes:
        choice: The latest one.
    """

    choice: Choice | None = None
    _asked: Ask | None = None  # at the latest choice

    def __init__(self, fleet: Fleet, body: Mapping[str, Any]) -> None:
        self._fleet, self._body = fleet, body
        self._marks: dict[str, int] = {}  # of `Prefixes`, by the nodes that were asked
        self._prompt: tuple[NodeLoad, Work] | None = None  # that is being computed
        self._computed_at: tuple[NodeLoad, float] | None = None
        self._answer: tuple[NodeLoad, Work] | None = None  # that is being given
        self._coming: tuple[NodeLoad, Work] | None = None  # the answer that will be given after a handover

    @cached_property
    def keys(self) -> list[int]:
        """Of the prompt's pieces."""
        return self._fleet.prefixes.keys_of(self._body)

    def ask(self) -> Ask:
        """Return what the choice of nodes depends on, as it is now."""
        num_tokens, shares = self.num_tokens, self._fleet.prefixes.shares(self.keys)
        cached = {url: int(share * num_tokens) for url, share in shares.items()}
        limit = next(filter(None, map(self._body.get, LIMITS)), None)
        limit = min(limit, MAX_ANSWER_TOKENS) if type(limit) is int and limit > 0 else 0
        self._asked = Ask(num_tokens, limit, cached, is_stream=self._body.get("stream") is True)
        return self._asked

    @cached_property
    def num_tokens(self) -> int:
        """About how many tokens the prompt has."""
        return size_in_tokens(self._body)

    @classmethod
    def mirror(cls, fleet: Fleet, num_tokens: int, keys: list[int]) -> Progress:
        """Return the progress of a request of another process, whose steps are replayed."""
        progress = cls(fleet, {})
        progress.num_tokens, progress.keys = num_tokens, keys
        return progress

    def prompt_asked(self, url: str) -> None:
        """Note that a node is asked to compute the prompt."""
        load, choice = self._fleet.load(url), self.choice
        ask = self._asked or self.ask()
        spare_s, coming = 0.0, tuple[Any, ...]()
        if choice is not None and choice.is_local:
            spare_s = choice.spare_s
        elif choice is not None and choice.prefill is load:
            coming = choice.decode.url, choice.ttft_s, choice.slack_s
        self._step("prompt_asked", url, ask.num_missing(load), ask.num_steps, spare_s, *coming)

    def prompt_ended(self, *, is_computed: bool) -> None:
        """Note that the prompt is computed, or given up."""
        if self._prompt is not None or self._coming is not None:
            self._step("prompt_ended", is_computed)

    def answer_began(self, url: str) -> None:
        """Note the beginning of an answer, or that a node is asked for a whole one."""
        self._step("answer_began", url, self.choice.spare_s if self.choice is not None else 0.0)

    def tokens_came(self, num: int) -> None:
        """Note tokens of the answer that came together."""
        if self._answer is not None and num > 0:
            self._step("tokens_came", num)

    def answer_ended(self) -> None:
        """Note that no more tokens come from the node."""
        if self._answer is not None:
            self._step("answer_ended")

    def ended(self) -> None:
        """Take all of the request out of the loads."""
        self._step("ended")

    def _step(self, name: str, *details: Any) -> None:
        now = self._fleet.clock()
        self._fleet.on_step(self, name, now, details)
        self.replay(name, now, details)

    # -- the same here and in other processes --------------------------------------------------------

    def replay(self, name: str, now: float, details: Sequence[Any]) -> None:
        """Do a step that was made at a time, here or in another process of this host."""
        _STEPS[name](self, now, *details)

    def _prompt_asked(
        self,
        now: float,
        url: str,
        num_missing: int,
        num_steps: float,
        spare_s: float,
        decode_url: str = "",
        ttft_s: float = 0.0,
        slack_s: float = 0.0,
    ) -> None:
        self._prompt_ended(now, False)
        load = self._fleet.load(url)
        self._marks[url] = self._fleet.prefixes.mark(url)
        self._prompt = load, Work(num_missing, now, spare_s)
        load.prompt_asked(self._prompt[1], self.num_tokens, num_steps)
        if decode_url:
            decode = self._fleet.load(decode_url)
            self._coming = decode, Work(0, now + ttft_s, slack_s)
            decode.coming[self._coming[1]] = None

    def _prompt_ended(self, now: float, is_computed: bool) -> None:
        if not is_computed:
            self._forget_coming()
        if self._prompt is None:
            return
        (load, prompt), self._prompt = self._prompt, None
        load.prompt_ended(prompt, now, is_computed=is_computed)
        if is_computed:
            self._computed_at = load, now
            self._fleet.prefixes.add(self.keys, load.url, self._marks.get(load.url))

    def _answer_began(self, now: float, url: str, spare_s: float) -> None:
        self._answer_ended(now)
        self._forget_coming()
        load = self._fleet.load(url)
        # Once: if the answer moves, its cache comes from another node, long after this.
        computed, self._computed_at = self._computed_at, None
        if computed is not None and computed[0] is not load:
            seconds = now - computed[1] - load.step.at(len(load.answers) + 1)
            self._fleet.handover(computed[0], load).add(max(0.0, seconds), self.num_tokens)
        if computed is None or computed[0] is not load:
            self._marks[url] = self._fleet.prefixes.mark(url)
            self._fleet.prefixes.add(self.keys, url, self._marks[url])
        self._answer = load, Work(0, now, spare_s)
        load.answer_began(self._answer[1])

    def _tokens_came(self, now: float, num: int) -> None:
        if self._answer is not None:
            load, answer = self._answer
            load.tokens_came(answer, now, num)

    def _answer_ended(self, now: float) -> None:
        if self._answer is not None:
            load, answer = self._answer
            del load.answers[answer]
            if (mark := self._marks.get(load.url)) is not None:
                self._fleet.prefixes.add_later(self.keys, load.url, mark)
            self._answer = None

    def _forget_coming(self) -> None:
        if self._coming is not None:
            load, answer = self._coming
            del load.coming[answer]
            self._coming = None

    def _ended(self, now: float) -> None:
        self._prompt_ended(now, False)
        self._answer_ended(now)

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Do not count the answer that this request will get: it must not avoid its own node when that is
        chosen again.
        """
        if self._coming is None:
            yield
            return
        load, answer = self._coming
        del load.coming[answer]
        try:
            yield
        finally:
            load.coming[answer] = None


_STEPS: Mapping[str, Callable[..., None]] = {
    "prompt_asked": Progress._prompt_asked,
    "prompt_ended": Progress._prompt_ended,
    "answer_began": Progress._answer_began,
    "tokens_came": Progress._tokens_came,
    "answer_ended": Progress._answer_ended,
    "ended": Progress._ended,
}


def size_in_tokens(body: Mapping[str, Any]) -> int:
    """Return about how many tokens a prompt has."""
    prompt = next(filter(None, map(body.get, PROMPTS)), "")
    if isinstance(prompt, list) and set(map(type, prompt)) <= {int}:
        return len(prompt)
    return len(json.dumps(prompt, ensure_ascii=False).encode()) // BYTES_PER_TOKEN
