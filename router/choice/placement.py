"""Where a request's prompt is computed: at the node that answers, or at another one that hands its cache
over.

Comes in: what each node has to do, what it has taken for that so far, and how much of the prompt it has
cached. Goes out: one node for the prompt, one for the answer, and the estimates behind the choice. Pure: the
caller tells the time.

The arithmetic is in `docs/router-design.md`. What must never break: an estimate may be wrong, but never
infinite or negative, so that no node is shut out for ever by what it has once shown; and a decision takes two
passes over the nodes and a few pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from .estimates import (
    ALIKE,
    ANSWER_TOKENS,
    FADING_OF_STEPS,
    LATELY_S,
    MIN_S,
    SURELY_KEPT,
    WEIGHT,
    Line,
    Rate,
    chance_of_more,
    chance_to_miss,
)
from .roles import Recent, Roles, Times

#: What a first request is estimated with, before any node was seen: a small model on one core. A few requests
#: outweigh it. Points of a line over the tokens of a prompt, and over the answers of a step.
SECONDS_PER_PROMPT = ((16.0, 0.045), (512.0, 0.54))
SECONDS_PER_STEP = ((1.0, 0.03), (8.0, 0.06))
HANDOVER_S, SECONDS_PER_HANDED_TOKEN = 0.02, 2e-5
#: Weight of that first guess, in prompts, in steps, and in handed-over tokens.
GUESSED_PROMPTS, GUESSED_STEPS, GUESSED_HANDED = 0.2, 0.5, 256.0

# Eight numbers are neither arithmetic nor bounds, here and in `estimates` and `roles`. They were chosen in
# virtual time; `lab/bench/placement.py` lists them, and `docs/sizing.md` shows what other values do.

#: Without a limit, a request is late when it takes so many times what it would take at an idle node.
PATIENCE = 3.0
#: No way is taken that costs so many times as much time as the one with the least, whichever limits it keeps.
MAX_TIMES = 3.0
#: Cost, in missed limits, of an answer at a node that is kept for prompts. It delays later ones, which no
#: estimate for this request alone sees. A prompt at a node that is not kept costs `WEIGHT` of that.
WEIGHT_IN_THE_WAY = 0.5
#: Nodes of each kind that are compared in detail.
NUM_COMPARED = 3
#: Of fewer nodes none is kept for prompts: comparing all pairs finds as much.
MIN_NODES_WITH_ROLES = 3


@dataclass(eq=False)
class Work:
    """A prompt that a node has to compute, or an answer that it is giving.

    Attributes:
        num_tokens: Of a prompt, those that are to be computed.
        at: When the prompt was sent there, or the answer's latest token came.
        spare_s: Of an answer, and of a prompt whose answer the same node will give: by how much later its
            tokens may come, in sum, for the limits to be kept. Not above 0: nothing can make it late. It is
            late already, another node answers, or the client does not stream.
    """

    num_tokens: int
    at: float
    spare_s: float = 0.0


class Pace:
    """What work has taken at all nodes together, for those that have shown nothing yet.

    Without it a node would stay unused if others are faster than the first guess: more nodes would not help.

    Attributes:
        prompt_alone: As `prompt`, at nodes that give no answer.
        is_known: Prompts and steps were measured, and are no guess.
    """

    def __init__(self) -> None:
        self.prompt, self.prompt_alone = (Line(SECONDS_PER_PROMPT, GUESSED_PROMPTS) for _ in range(2))
        self.step = Line(SECONDS_PER_STEP, GUESSED_STEPS, FADING_OF_STEPS)
        self.roles = Roles()
        self._has_prompts = self._has_steps = False

    @property
    def is_known(self) -> bool:
        return self._has_prompts and self._has_steps

    def prompt_measured(self, num_tokens: int, seconds: float, num_answers: int) -> None:
        """Take in the seconds that a prompt took at a node which was giving `num_answers` answers."""
        # It waited for half a step, and shared the next one with the answers.
        beside_s = self.step.at(num_answers) / 2 + self.step.slope * num_answers if num_answers else 0.0
        alone_s = max(MIN_S, seconds - beside_s)
        if not self._has_prompts:
            self.prompt.rescale(num_tokens, seconds)
            self.prompt_alone.rescale(num_tokens, alone_s)
        self._has_prompts = True
        self.prompt.add(num_tokens, seconds)
        self.prompt_alone.add(num_tokens, alone_s)

    def step_measured(self, num_answers: int, seconds: float) -> None:
        if not self._has_steps:
            self.step.rescale(num_answers, seconds)
        self._has_steps = True
        self.step.add(num_answers, seconds)


def _own(line: Line, guesses: Sequence[tuple[float, float]], weight: float) -> Line:
    """Return the line of one node, which begins as that of all."""
    return Line([(x, line.at(x)) for x, _ in guesses], weight, line.fading)


@dataclass(eq=False)
class NodeLoad:
    """What a node has to do for this router, and what such work has taken there.

    Attributes:
        prompts: In the order in which it computes them.
        answers: Those that it is giving.
        coming: Those that it will give when another node has computed their prompts; `at` is when that
            probably is, and `spare_s` what their first tokens can wait.
        pace: Of all nodes.
        prompt: Seconds per prompt, by the number of tokens that are computed. Until one was measured, that of
            `pace`.
        step: Seconds per token of an answer while no prompt is computed there, by the number of answers. As
            with `prompt`.
        queue_s: Until it has computed the prompts that it has.
        num_other_prompts, num_other_answers: Those of other routers' requests, at the latest check.
        prompt_trouble, answer_trouble: How bad it is to choose for a prompt, and for an answer, by its state
            and its failures. That comes before all times: a node that does not work may look as if it had
            nothing to do.
        is_kept: It was kept for prompts at the latest choice.
    """

    url: str
    pace: Pace = field(default_factory=Pace)
    prompts: dict[Work, None] = field(default_factory=dict)
    answers: dict[Work, None] = field(default_factory=dict)
    coming: dict[Work, None] = field(default_factory=dict)
    prompt: Line = field(init=False)
    step: Line = field(init=False)
    queue_s: float = 0.0
    num_other_prompts: int = 0
    num_other_answers: int = 0
    prompt_trouble: int = 0
    answer_trouble: int = 0
    is_kept: bool = False
    # The most requests that it had of this router since the latest check. One that came or ended during a
    # check must not look like another router's.
    _most_requests: int = 0
    _num_waiting: int = 0  # tokens of its prompts
    _done_at: float = 0.0  # when it had computed its latest prompt
    # Prompts that it was sent lately, the seconds that they take, and when the latest was sent.
    _recent: float = 0.0
    _recent_s: float = 0.0
    _recent_at: float = 0.0

    def __post_init__(self) -> None:
        self.prompt, self.step = self.pace.prompt, self.pace.step

    @property
    def num_requests(self) -> int:
        """How many of this router's requests it may have.

        In a rendezvous it has those whose prompts are computed elsewhere, too.
        """
        return len(self.prompts) + len(self.answers) + len(self.coming)

    @property
    def num_answers(self) -> int:
        """Answers that it is giving, other routers' included."""
        return len(self.answers) + self.num_other_answers

    @property
    def num_answers_soon(self) -> int:
        """The same, with those whose prompts other nodes compute for it.

        A choice that does not see these gives one node the answers of all prompts that come together.
        """
        return self.num_answers + len(self.coming)

    def note_all(self, num_running: int, num_waiting: int) -> None:
        """Note what the node says that it has to do for all its clients.

        What is not this router's is other routers'.
        """
        num_others = max(0, num_running + num_waiting - max(self._most_requests, self.num_requests))
        self._most_requests = self.num_requests
        self.num_other_prompts = min(num_others, max(0, num_waiting - len(self.prompts) - len(self.coming)))
        self.num_other_answers = num_others - self.num_other_prompts
        self._estimate_queue()

    def prompt_asked(self, prompt: Work, num_tokens: int, num_steps: float) -> None:
        """Note a prompt that it is to compute.

        Args:
            num_tokens: Of the whole prompt, the cached ones included.
            num_steps: Tokens that the answer may have.
        """
        self.prompts[prompt] = None
        self._most_requests = max(self._most_requests, self.num_requests)
        self.pace.roles.note(Recent(prompt.at, prompt.num_tokens, num_tokens, num_steps))
        self._num_waiting += prompt.num_tokens
        self._estimate_queue()
        fading = math.exp(-max(0.0, prompt.at - self._recent_at) / LATELY_S)
        self._recent = self._recent * fading + 1
        self._recent_s = self._recent_s * fading + self.prompt.at(prompt.num_tokens)
        self._recent_at = prompt.at

    def wait_s(self, now: float) -> float:
        """Return the seconds until it has computed the prompts that it has, of which it has computed the
        first for a while.
        """
        first = next(iter(self.prompts), None)
        if first is None:
            return self.queue_s  # that of other routers' prompts
        computed_s = max(0.0, now - max(first.at, self._done_at))
        return self.queue_s - min(computed_s, self.prompt.at(first.num_tokens))

    def to_come(self, now: float) -> tuple[float, float]:
        """Return how many prompts per second it was sent lately, and how long one takes on average."""
        fading = math.exp(-max(0.0, now - self._recent_at) / LATELY_S)
        # Less one, so that a conversation does not take its own turns for those of others.
        num = max(0.0, self._recent * fading - 1)
        return num / LATELY_S, self._recent_s / self._recent if self._recent else 0.0

    def answer_began(self, answer: Work) -> None:
        """Note an answer that it is giving."""
        self.answers[answer] = None
        self._most_requests = max(self._most_requests, self.num_requests)

    def prompt_ended(self, prompt: Work, now: float, *, is_computed: bool) -> None:
        """Note that a prompt is computed, or given up."""
        del self.prompts[prompt]
        self._num_waiting -= prompt.num_tokens
        if is_computed:
            # It waited for the one before it.
            seconds = now - max(prompt.at, self._done_at)
            if self.prompt is self.pace.prompt:
                self.prompt = _own(self.prompt, SECONDS_PER_PROMPT, GUESSED_PROMPTS)
                self.prompt.rescale(prompt.num_tokens, seconds)
            self.prompt.add(prompt.num_tokens, seconds)
            self.pace.prompt_measured(prompt.num_tokens, seconds, self.num_answers)
            self._done_at = now
        self._estimate_queue()

    def _estimate_queue(self) -> None:
        # Here and not when it is asked for, because every choice asks every node.
        self.queue_s = len(self.prompts) * self.prompt.start + self._num_waiting * self.prompt.slope
        if self.num_other_prompts:
            self.queue_s += self.num_other_prompts * self.prompt.at(self.pace.roles.mean_missing)

    def tokens_came(self, answer: Work, now: float, num_tokens: int) -> None:
        """Note tokens of an answer that came together.

        Their time is not that of steps if prompts were computed meanwhile.
        """
        seconds, answer.at = now - answer.at, now
        if math.isfinite(seconds):
            answer.spare_s -= seconds - num_tokens * self.step.at(self.num_answers)
        if not self.prompts:
            if self.step is self.pace.step:
                self.step = _own(self.step, SECONDS_PER_STEP, GUESSED_STEPS)
                self.step.rescale(self.num_answers, seconds / num_tokens)
            self.step.add(self.num_answers, seconds / num_tokens)
            self.pace.step_measured(self.num_answers, seconds / num_tokens)

    def num_delayed(self, seconds: float, now: float) -> float:
        """Return how many answers would become late if a prompt that takes so long came after those that it
        has.
        """
        num, behind_s = 0.0, 0.0
        for prompt in reversed(self.prompts):
            num += _made_late(prompt, behind_s, seconds)
            behind_s += self.prompt.at(prompt.num_tokens)
        wait_s = self.wait_s(now)
        num += sum(_made_late(answer, wait_s, seconds) for answer in self.answers)
        for answer in self.coming:
            before_s = now + wait_s - answer.at
            if before_s + seconds > 0:
                num += _made_late(answer, max(0.0, before_s), min(seconds, before_s + seconds))
        return num


def _made_late(work: Work, before_s: float, seconds: float) -> float:
    # Most have time to spare, and there are many.
    if work.spare_s <= 0 or before_s + seconds <= SURELY_KEPT * work.spare_s:
        return 0.0
    return chance_to_miss(before_s + seconds, work.spare_s) - chance_to_miss(before_s, work.spare_s)


@dataclass(frozen=True)
class Limits:
    """What a user wants kept; 0: `PATIENCE` times what an idle node would take."""

    ttft_s: float = 0.0
    itl_s: float = 0.0


@dataclass(frozen=True)
class Ask:
    """A request.

    Attributes:
        num_tokens: Of the prompt.
        num_answer_tokens: At most; 0: not known.
        cached: URL of a node → tokens of the prompt that it probably has cached.
        is_stream: The client sees when each token comes.
    """

    num_tokens: int
    num_answer_tokens: int = 0
    cached: Mapping[str, int] = field(default_factory=dict)
    is_stream: bool = True

    @property
    def num_steps(self) -> float:
        """Tokens of the answer, if it is as long as it may be."""
        return self.num_answer_tokens or ANSWER_TOKENS

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
        num_late: Requests that will miss a limit because of this one, itself included.
        total_s: All time that it takes and adds.
        score: What is compared; the lowest is taken.
        spare_s: As in `Work`, when its answer begins.
        slack_s: By how much later its first token may come. Not above 0: it is late already.
        alternative_s: The total of the best choice of the other kind; infinite if there is none.
    """

    prefill: NodeLoad
    decode: NodeLoad
    ttft_s: float
    others_s: float
    num_late: float
    total_s: float
    score: float
    spare_s: float
    slack_s: float
    alternative_s: float = math.inf

    @property
    def is_local(self) -> bool:
        return self.prefill is self.decode

    def __str__(self) -> str:
        way, other = ("local", "a handover") if self.is_local else ("handover", "local")
        more_s = self.alternative_s - self.total_s
        if math.isinf(more_s):
            why = "the only way"
        elif more_s >= 0:
            why = f"{other} would take {_in_ms(more_s)} more in all"
        else:
            why = f"keeps the limits better than {other}, which would take {_in_ms(-more_s)} less in all"
        return (
            f"{way}: {why}; first token {_in_ms(self.ttft_s)}, others delayed {_in_ms(self.others_s)}, "
            f"{self.num_late:.2f} requests late"
        )


def choose(
    ask: Ask,
    prefills: Sequence[NodeLoad],
    decodes: Sequence[NodeLoad],
    handover: Callable[[NodeLoad, NodeLoad], Rate],
    limits: Limits,
    now: float = 0.0,
    *,
    may_be_local: bool = True,
    may_hand_over: bool = True,
) -> Choice | None:
    """Choose the nodes for a request.

    The pairs with the least trouble are compared. The fewest late requests come first, and then the least
    time.

    Args:
        prefills, decodes: The nodes that may compute its prompt, and those that may answer it. A node may be
            in both. Of nodes that are alike, the one with the most of the prompt is taken, or the first.
        handover: Seconds per token, for a pair of nodes.

    Returns:
        None if there is no such pair.
    """
    able = set(prefills)
    both = [node for node in decodes if node in able]
    num_kept = 0
    if may_be_local and may_hand_over and len(both) >= MIN_NODES_WITH_ROLES and both[0].pace.is_known:
        num_kept = _num_for_prompts(both, limits, now)
        # Where each node does both, a handover only adds to what its prompt takes.
        may_hand_over = num_kept > 0 or len(both) < len(decodes) or len(both) < len(prefills)
    for_prompts = keep_for_prompts(both, num_kept)
    first = prefills if may_hand_over else ()
    pairs = _shortlisted(ask, first, decodes, both if may_be_local else (), for_prompts)
    if not pairs:
        return None
    least = min(prefill.prompt_trouble + decode.answer_trouble for prefill, decode in pairs)
    pairs = {pair: None for pair in pairs if pair[0].prompt_trouble + pair[1].answer_trouble == least}
    limits = Limits(
        limits.ttft_s or PATIENCE * min(prefill.prompt.at(ask.num_tokens) for prefill, _ in pairs),
        limits.itl_s or PATIENCE * min(decode.step.at(1) for _, decode in pairs),
    )
    prompts = {prefill: _prompt_at(ask, prefill, now) for prefill, _ in pairs}
    choices = [_rated(ask, prompts[prefill], decode, handover, limits, now) for prefill, decode in pairs]
    if len(choices) == 1:
        return choices[0]
    # Nodes that are kept have no answers, so one would come fastest there: the best other way stays allowed.
    highest_s = max(
        MAX_TIMES * min(each.total_s for each in choices),
        min((each.total_s for each in choices if each.decode not in for_prompts), default=0.0),
    )
    chosen = min(
        (each for each in choices if each.total_s <= highest_s),
        key=lambda each: (
            each.score
            + WEIGHT_IN_THE_WAY * ((each.decode in for_prompts) + WEIGHT * (each.prefill not in for_prompts))
        ),
    )
    chosen = min(
        (each for each in choices if _are_alike(each, chosen)),
        key=lambda each: (
            ask.num_missing(each.prefill),
            prefills.index(each.prefill),
            decodes.index(each.decode),
        ),
    )
    others = (each.total_s for each in choices if each.is_local is not chosen.is_local)
    return replace(chosen, alternative_s=min(others, default=math.inf))


def _shortlisted(
    ask: Ask,
    prefills: Sequence[NodeLoad],
    decodes: Sequence[NodeLoad],
    both: Sequence[NodeLoad],
    for_prompts: AbstractSet[NodeLoad],
) -> dict[tuple[NodeLoad, NodeLoad], None]:
    """Return the pairs that are worth to be compared in detail.

    Args:
        prefills: Nodes that may hand a prompt over to one of `decodes`.
        both: Nodes that may do both.
    """
    if len(decodes) == 1 and len(prefills) <= 1:  # nothing to choose, so this need not cost anything
        ways = [*((node, node) for node in both), *((node, decodes[0]) for node in prefills)]
        return dict.fromkeys(way for way in ways if way[0] is not way[1] or way[0] in both)
    glances = {node: _glance(ask, node) for node in {*prefills, *decodes, *both}}
    pairs: dict[tuple[NodeLoad, NodeLoad], None] = {}
    # At one node: as if none were kept for prompts, and as if answers could not be given at those.
    for own in (both, [node for node in both if node not in for_prompts]) if for_prompts else (both,):
        if own:
            candidates = _least(
                own, [(node.prompt_trouble + node.answer_trouble, sum(glances[node])) for node in own]
            )
            # A request that is late anywhere is best added to the longest queue: no other one becomes late
            # for it.
            candidates[max(own, key=attrgetter("queue_s"))] = None
            pairs |= {(node, node): None for node in candidates}
    if prefills:
        # A handover's cost hardly depends on the pair, so each end is shortlisted by itself.
        for_answers = set(both) - for_prompts if for_prompts else ()
        able = [node for node in prefills if node not in for_answers]
        firsts = _least(able, [(node.prompt_trouble, glances[node][0]) for node in able])
        answering = [node for node in decodes if node not in for_prompts]
        seconds = _least(
            answering, [(node.answer_trouble, glances[node][1] + node.queue_s) for node in answering]
        )
        pairs |= {(first, second): None for first in firsts for second in seconds if first is not second}
    return pairs


def _are_alike(one: Choice, best: Choice) -> bool:
    """Whether a choice is as good as the best one, as far as estimates can tell."""
    ends = zip((one.prefill, one.decode), (best.prefill, best.decode), strict=True)
    return (
        one.is_local is best.is_local
        and all(_work_at(node) == _work_at(other) for node, other in ends)
        and one.score <= best.score + ALIKE
    )


def _work_at(node: NodeLoad) -> tuple[int, ...]:
    others = node.num_other_prompts, node.num_other_answers
    return len(node.prompts), len(node.answers), len(node.coming), *others


def _num_for_prompts(nodes: Sequence[NodeLoad], limits: Limits, now: float) -> int:
    """Return at how many of the nodes an answer would be in the way, as `Roles` decides."""
    pace, roles = nodes[0].pace, nodes[0].pace.roles
    if roles.are_due(now):
        num_own = sum(node.num_requests for node in nodes)
        num_others = sum(node.num_other_prompts + node.num_other_answers for node in nodes)
        itl_s = limits.itl_s or PATIENCE * pace.step.at(1)
        patience = 0.0 if limits.ttft_s else PATIENCE
        times = Times(pace.prompt_alone, pace.step, itl_s, limits.ttft_s, patience, HANDOVER_S)
        # Other routers' requests are taken to be like this router's.
        roles.decide(now, len(nodes), times, num_own / (num_own + num_others) if num_own else 1.0)
    return min(roles.num, len(nodes) - 1)


def keep_for_prompts(nodes: Sequence[NodeLoad], num: int) -> set[NodeLoad]:
    """Keep a number of nodes for prompts, those with the fewest answers, and return them.

    Without them answers spread over all nodes, because each is best given where there are few, and then every
    prompt pauses some.
    """
    kept = {node for node in nodes if node.is_kept}
    if len(kept) == num:
        return kept
    # Those that are kept already stay so: the answers of a node that changes its role are paused by prompts.
    ordered = sorted(nodes, key=lambda node: (not node.is_kept, node.num_answers_soon))
    for place, node in enumerate(ordered):
        node.is_kept = place < num
    return set(ordered[:num])


def _least(nodes: Sequence[NodeLoad], costs: Sequence[tuple[int, float]]) -> dict[NodeLoad, None]:
    """Return the nodes that cost least, the least first; of equal ones, those that come first."""
    places = sorted(range(len(nodes)), key=costs.__getitem__)
    return {nodes[place]: None for place in places[:NUM_COMPARED]}


def _glance(ask: Ask, node: NodeLoad) -> tuple[float, float]:
    """Return what the prompt would take and add if this node computed it, and what the answer would if it
    gave it.
    """
    # Every choice does this for every node, so it calls nothing.
    num_answers, prompt, step = len(node.answers) + node.num_other_answers, node.prompt, node.step
    num_missing = ask.num_tokens - ask.cached.get(node.url, 0)
    prompt_s = prompt.start + prompt.slope * num_missing
    steps_s = step.start + step.slope * (2 * (num_answers + len(node.coming)) + 1)
    # Each answer of the node pauses while it computes.
    return node.queue_s + prompt_s * (1 + num_answers), ask.num_steps * steps_s


class _Prompt(NamedTuple):
    """What computing a prompt at a node means.

    Attributes:
        wait_s: Until it begins.
        seconds: It takes.
        num_delayed: Other requests that become late.
    """

    node: NodeLoad
    wait_s: float
    seconds: float
    num_delayed: float


def _prompt_at(ask: Ask, node: NodeLoad, now: float) -> _Prompt:
    seconds = node.prompt.at(ask.num_missing(node))
    return _Prompt(node, node.wait_s(now), seconds, node.num_delayed(seconds, now))


def _rated(
    ask: Ask,
    prompt: _Prompt,
    decode: NodeLoad,
    handover: Callable[[NodeLoad, NodeLoad], Rate],
    limits: Limits,
    now: float,
) -> Choice:
    prefill, wait_s, prompt_s, num_delayed = prompt
    step_s = decode.step.at(decode.num_answers + 1)
    is_local = prefill is decode
    handover_s = 0.0 if is_local else HANDOVER_S + handover(prefill, decode).seconds * ask.num_tokens
    # Computing a prompt gives the first token. After a handover, the decode node takes a step for it, as soon
    # as its present one ends.
    ttft_s = wait_s + prompt_s + handover_s + (0.0 if is_local else 1.5 * step_s)
    # Each answer of the node that computes the prompt pauses meanwhile, and so does this one for the prompts
    # of its own node.
    others_s = prefill.num_answers * prompt_s
    pause_s = 0.0 if is_local else max(0.0, decode.wait_s(now) - ttft_s)
    num_steps = ask.num_steps
    ttft_limit_s, itl_limit_s = limits.ttft_s, limits.itl_s
    late = chance_to_miss(ttft_s, ttft_limit_s)
    spare_s = (num_steps - 1) * (itl_limit_s - step_s) - pause_s
    if ask.is_stream and num_steps > 1:
        rate, next_s = decode.to_come(now)
        # Prompts that come while this one waits or is computed are computed right after it, that is, during
        # its answer.
        window_s = num_steps * step_s + (wait_s + prompt_s if is_local else next_s)
        late = max(
            late, 1.0 if spare_s <= 0 else chance_of_more(rate * window_s, spare_s / max(next_s, MIN_S))
        )
    is_safe_from_others = late >= 1 or not ask.is_stream
    num_late = late + num_delayed
    total_s = ttft_s + others_s + pause_s + _glance(ask, decode)[1]
    # Its own wait does not count if it is late in any case. A queue that grows must not attract all requests.
    weighed_s = total_s if late < 1 else -wait_s
    score = num_late + WEIGHT * max(-1.0, weighed_s / (ttft_limit_s + num_steps * itl_limit_s))
    return Choice(
        prefill,
        decode,
        ttft_s,
        others_s,
        num_late,
        total_s,
        score,
        spare_s=0.0 if is_safe_from_others else spare_s,
        slack_s=ttft_limit_s - ttft_s,
    )


def _in_ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{1 if seconds < 0.01 else 0}f} ms"
