"""What became of a request under a fault, and of the servers after it. This module is pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvferry.lab.demo.near_tie import AskAlone, compare


class Outcome(StrEnum):
    """The class of one run of a cell, from the best to the worst."""

    RIGHT = "right"
    ERROR = "error"
    LEAK = "leak"
    HANG = "hang"
    DEAD = "dead"
    WRONG = "wrong"


#: What each class means, for the table's legend.
MEANINGS: Mapping[Outcome, str] = {
    Outcome.RIGHT: "the tokens of a single server, apart from near-ties; in *afterwards*: all blocks came back, and a new handoff was right",
    Outcome.ERROR: "the client got an error, or the end of the connection, within the deadline",
    Outcome.LEAK: "blocks were still in use long after every request had ended and every lease was over",
    Outcome.HANG: "the client got no end of its answer within the deadline",
    Outcome.DEAD: "a server that was not killed ended, or no longer answered, or handed nothing over any more",
    Outcome.WRONG: "HTTP 200 and other tokens than a single server's, or the same tokens with other log probabilities",
}
#: The classes that no fault excuses.
BAD = frozenset({Outcome.LEAK, Outcome.HANG, Outcome.DEAD, Outcome.WRONG})


@dataclass(frozen=True)
class Reply:
    """How a request ended, as its client saw it.

    Attributes:
        status: HTTP status; 0 if the connection broke before one came.
        token_ids, logprobs: The answer so far.
        is_whole: The server said that the answer is complete.
        error: What the server or the connection said instead of an answer.
        is_late: The deadline passed before the end.
        seconds: From the request to its end.
        params: The transfer params of the answer.
    """

    status: int = 0
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    is_whole: bool = False
    error: str = ""
    is_late: bool = False
    seconds: float = 0.0
    params: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Verdict:
    """The outcome of one run of a cell.

    Attributes:
        why: One line about an outcome other than right.
        loaded: Whether the decode server used a cache that it had not computed; None if that was not looked
            at.
        near_ties: Tokens that differ, but were nearly as likely as the single server's.
    """

    outcome: Outcome
    why: str = ""
    loaded: bool | None = None
    near_ties: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Expected:
    """A single server's answer to a prompt."""

    prompt: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float] = field(default=())


def judge(reply: Reply, expected: Expected, ask_alone: AskAlone, tolerance: float) -> Verdict:
    """Return the verdict on a reply.

    The tokens that a client got before an error are judged as well: they must be a beginning of the right
    answer.

    Args:
        ask_alone: Called where the two answers differ.
        tolerance: See `near_tie.tolerance_of`.
    """
    compared = compare(
        expected.prompt,
        reply.token_ids,
        expected.token_ids,
        ask_alone,
        tolerance=tolerance,
        is_whole=reply.is_whole,
        logprobs=reply.logprobs,
        expected_logprobs=expected.logprobs,
    )
    near_ties, seconds = len(compared.near_ties), round(reply.seconds, 3)
    if reply.status == 200 and compared.mismatch is not None:
        return Verdict(Outcome.WRONG, str(compared.mismatch), None, near_ties, seconds)
    if reply.is_late:
        return Verdict(Outcome.HANG, f"no end after {reply.seconds:.1f} s", None, near_ties, seconds)
    if not reply.is_whole:
        why = reply.error or f"status {reply.status}"
        return Verdict(Outcome.ERROR, why.splitlines()[0][:300], None, near_ties, seconds)
    return Verdict(Outcome.RIGHT, "", None, near_ties, seconds)


@dataclass(frozen=True)
class Rest:
    """What was found after everything had ended.

    Attributes:
        used: Server → share of its pool that is still in use, of the servers whose pool did not come back.
        dead: Server → what is wrong with it.
        control: The verdict on a new handoff, after the fault.
        waited_s: How long the pools were given.
    """

    used: Mapping[str, float]
    dead: Mapping[str, str]
    control: Verdict | None
    waited_s: float


def judge_rest(rest: Rest) -> Verdict:
    """Return the verdict for the column *afterwards*: wrong tokens first, then a dead server, then a leak."""
    control = rest.control
    if control is not None and control.outcome is Outcome.WRONG:
        return Verdict(Outcome.WRONG, f"a new handoff: {control.why}", control.loaded)
    if rest.dead:
        name, why = next(iter(rest.dead.items()))
        return Verdict(Outcome.DEAD, f"{name}: {why}")
    if control is not None and control.outcome is not Outcome.RIGHT:
        return Verdict(Outcome.DEAD, f"no new handoff succeeds: {control.outcome}: {control.why}")
    if rest.used:
        name, share = next(iter(rest.used.items()))
        return Verdict(Outcome.LEAK, f"{name} still uses {share:.1%} of its pool after {rest.waited_s:.0f} s")
    return Verdict(Outcome.RIGHT, "", None if control is None else control.loaded)


Judge = Callable[[Reply, Expected], Verdict]


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the worst of some outcomes."""
    order = list(Outcome)
    return max(outcomes, key=order.index)
