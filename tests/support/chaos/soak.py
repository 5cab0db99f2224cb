"""A run: a fleet, traffic and faults; what must hold meanwhile, and what must be true afterwards."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product

from tests.support.client import DO_REMOTE_DECODE, Client, ask_alone, assert_answers_like, wait_until

from .fleet import Fleet
from .schedule import Fault, schedule, timeline
from .services import Holdings, Service
from .traffic import Ask, Outcome, Traffic, draw_asks
from .verdict import logged_errors, violations

NUM_CLIENTS = 5
MAX_PROMPT_TOKENS = 1200
#: After the last fault, for whatever has to come back.
QUIET_S = 40.0


@dataclass(frozen=True)
class Report:
    """What a run was like."""

    faults: Sequence[Fault]
    outcomes: Sequence[Outcome]

    def __str__(self) -> str:
        longest_s = max(outcome.ended_s - outcome.began_s for outcome in self.outcomes)
        return "\n".join(
            (
                f"{len(self.faults)} faults; the longest request took {longest_s:.1f} s",
                *_counted("requests", (outcome.ending for outcome in self.outcomes)),
                *_counted("refused", (outcome.answer.error.get("message", "") for outcome in self.outcomes)),
                *_counted("loads", (_load_of(outcome) for outcome in self.outcomes)),
            )
        )


def _load_of(outcome: Outcome) -> str:
    transfer = outcome.answer.transfer
    return str(transfer["error"] or transfer["mechanism"]) if transfer else ""


def _counted(what: str, names: Iterable[str]) -> list[str]:
    """A line for each name, the most frequent first; addresses, which differ from life to life, are left out."""
    counts = Counter(re.sub(r"\S*://\S*|\d+", "…", name)[:150] for name in names if name)
    return [f"{count:6} {what}: {name}" for name, count in counts.most_common()]


class Soak:
    """Faults and requests for a fleet, from a seed.

    Args:
        fleet: Started.
        single: A node of its own with the same model, whose answers count.
    """

    def __init__(self, fleet: Fleet, single: Client, seed: int, seconds: float) -> None:
        self._fleet = fleet
        self._single = single
        self._seed = seed
        self._faults = schedule(seed, seconds, fleet.kinds)
        self._befallen: list[Fault] = []
        self._began = time.monotonic()

    def run(self) -> Report:
        """Let it all happen, and look whether it went as it must.

        Raises:
            Exception: it did not; a note tells the seed, the faults, and what those who are gone logged.
        """
        try:
            return self._run()
        except BaseException as error:
            error.add_note(f"seed {self._seed}; the faults:\n" + "\n".join(map(str, self._befallen)))
            error.add_note("\n".join(service.logs for service in self._fleet.services.values()))
            raise

    def _run(self) -> Report:
        self._hand_over_in_every_pair("before")
        before = {node.name: node.holdings() for node in self._fleet.nodes}
        report = self._live_through()
        logs = [service.logs for service in self._fleet.services.values()]
        ask = ask_alone(self._single, ignore_eos=True)
        if objected := violations(report.faults, report.outcomes, ask) + logged_errors(logs):
            raise AssertionError("\n".join(objected))
        self._fleet.wait_ready()
        self._hand_over_in_every_pair("after")
        for node in self._fleet.nodes:
            wait_until(Client(node.process).is_whole, QUIET_S)
            _require_no_more(node, before[node.name])
        return report

    # -- faults and requests ---------------------------------------------------------------------------

    def _live_through(self) -> Report:
        self._began = time.monotonic()
        ports = {router.name: router.port for router in self._fleet.routers}
        streams = [
            draw_asks(NUM_CLIENTS * self._seed + client, list(ports), MAX_PROMPT_TOKENS)
            for client in range(NUM_CLIENTS)
        ]
        traffic = Traffic(streams, ports, self._expect, self._now)
        try:
            for at_s, act, fault in timeline(self._faults, self._begin, self._fleet.end):
                time.sleep(max(0.0, at_s - self._now()))
                act(fault)
        finally:
            outcomes = traffic.stop()
        return Report(self._befallen, outcomes)

    def _begin(self, fault: Fault) -> None:
        """Let a fault happen; on a busy machine that is later than it was meant to."""
        self._befallen.append(replace(fault, at_s=self._now()))
        self._fleet.begin(fault)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _expect(self, ask: Ask) -> list[int]:
        return self._single.complete(ask.prompt, max_tokens=ask.max_tokens, ignore_eos=True).token_ids

    # -- before and after ------------------------------------------------------------------------------

    def _hand_over_in_every_pair(self, when: str) -> None:
        """Have each decode node load from each prefill node.

        Raises:
            TimeoutError: one of them goes on to compute what it should load.
        """
        for prefill, decode in product(self._fleet.prefills, self._fleet.decodes):
            pair = f"{when}: from {prefill.name} to {decode.name}"
            wait_until(partial(self._hands_over, prefill, decode, _prompts(pair)), QUIET_S)

    def _hands_over(self, prefill: Service, decode: Service, prompts: Iterator[list[int]]) -> bool:
        prompt = next(prompts)
        asked = {"max_tokens": 1, "kv_transfer_params": DO_REMOTE_DECODE}
        params = Client(prefill.process).complete(prompt, **asked).body["kv_transfer_params"]
        wanted = {"max_tokens": 4, "ignore_eos": True, "kv_transfer_params": params}
        reply = Client(decode.process).complete(prompt, **wanted)
        if reply.status != 200 or reply.transfer.get("error", "nothing was loaded"):
            return False
        assert_answers_like(self._single, prompt, reply.token_ids, 4, ignore_eos=True)
        return True


def _prompts(text: str) -> Iterator[list[int]]:
    """Prompts of several blocks that no cache has."""
    return (list(f"{number} {text} {'.' * 200}".encode()) for number in count())


def _require_no_more(node: Service, before: Holdings) -> None:
    """See that a node has let go of what the run made it hold.

    Raises:
        TimeoutError: it has more threads, descriptors or mappings than before.
    """
    try:
        wait_until(lambda: node.holdings().is_within(before), QUIET_S)
    except TimeoutError:
        raise TimeoutError(f"{node.name} holds {node.holdings()}, after {before}") from None
