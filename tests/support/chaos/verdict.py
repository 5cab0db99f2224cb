"""Check that each request ended in a way that the faults allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.lab.demo.near_tie import AskAlone, compare

from .schedule import Fault
from .traffic import DEADLINE_S, Outcome

#: Seconds after a fault within which a terminated router breaks its last connections.
_STOP_S = 5.0
#: Reasons to refuse a request: there is no node, one was lost in the middle of its answer, or the router is
#: stopping.
_MAY_REFUSE = (
    "no prefill node can",
    "no decode node can",
    "lost in the middle",
    "the engine does not run",
    "the router is draining",
)
#: Or its load failed, if the node's policy is to fail.
_LOAD_FAILED = "generation_failed"

_MARKS = (" ERROR ", " CRITICAL ", "Traceback")


def violations(faults: Sequence[Fault], outcomes: Sequence[Outcome], ask_alone: AskAlone) -> list[str]:
    """Return one line per request that ended in a forbidden way.

    Near-ties of logits are printed, and allowed.

    Args:
        ask_alone: Asks a single node. Called if an answer differs from the expected one.
    """
    found = [
        f"{why}: {_described(outcome)}"
        for outcome in outcomes
        if (why := _violation(faults, outcome, ask_alone))
    ]
    if not any(outcome.ending == "whole" for outcome in outcomes):
        found.append("no request was answered")
    return found


def logged_errors(logs: Sequence[str]) -> list[str]:
    """Return logs that contain an error or a traceback. Injected faults may cause warnings at most."""
    return [log for log in logs if any(mark in log for mark in _MARKS)]


def _violation(faults: Sequence[Fault], outcome: Outcome, ask_alone: AskAlone) -> str:
    answer, expected, is_whole = outcome.answer, list(outcome.expected), outcome.ending == "whole"
    comparison = compare(outcome.ask.prompt, answer.token_ids, expected, ask_alone, is_whole=is_whole)
    for near_tie in comparison.near_ties:
        print(f"{near_tie}: {_described(outcome)}")
    if comparison.mismatch is not None:
        return f"not what a single node answers, {expected}: {comparison.mismatch}"
    if outcome.ended_s - outcome.began_s > DEADLINE_S:
        return "it took longer than its deadline"
    if outcome.ending == "refused" and not _may_refuse(answer.error):
        return "it was refused without an allowed reason"
    if outcome.ending == "broken" and not any(_may_break(fault, outcome) for fault in faults):
        return "its connection broke without a fault of its router"
    return ""


def _may_refuse(error: Mapping[str, Any]) -> bool:
    return error["code"] == _LOAD_FAILED or any(why in error["message"] for why in _MAY_REFUSE)


def _may_break(fault: Fault, outcome: Outcome) -> bool:
    """Whether a fault ended the router while it served the request."""
    begins_before = outcome.began_s <= fault.at_s + _STOP_S
    return fault.target == outcome.ask.router and begins_before and fault.at_s <= outcome.ended_s


def _described(outcome: Outcome) -> str:
    ask = outcome.ask
    kind = "a stream" if ask.stream else "an answer"
    return (
        f"{kind} of {ask.max_tokens} tokens to {len(ask.prompt)} by {ask.router}, from {outcome.began_s:.2f} to "
        f"{outcome.ended_s:.2f} s: {outcome.ending} {outcome.why} {outcome.answer}"
    )
