"""A run of the soak: fleet, traffic and faults, and the checks during and after it."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, product
from pathlib import Path

from kvferry.lab.demo.near_tie import AskAlone
from tests.support.client import DO_REMOTE_DECODE, Client, ask_alone, assert_answers_like, wait_until
from tests.support.losses import held_by

from .fleet import Fleet
from .sampling import Sampler
from .schedule import Fault, schedule, timeline
from .services import Holdings, Service
from .traffic import Ask, Outcome, Traffic, draw_asks
from .verdict import logged_errors, violations

NUM_CLIENTS = 5
MAX_PROMPT_TOKENS = 1200
#: Seconds after the last fault until the fleet must work normally again.
QUIET_S = 40.0
#: Samples of what each service holds during a run.
NUM_SAMPLES = 400


@dataclass(frozen=True)
class Report:
    """The summary of a run."""

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
    """Return one line per name, the most frequent first.

    Addresses and numbers are left out, because they differ.
    """
    counts = Counter(re.sub(r"\S*://\S*|\d+", "…", name)[:150] for name in names if name)
    return [f"{count:6} {what}: {name}" for name, count in counts.most_common()]


@dataclass(frozen=True)
class Engine:
    """What a soak does in another way with each engine.

    Attributes:
        single: A separate node with the fleet's model, whose answers are the expected ones.
        ask_alone: Asks it without blocks that it has cached.
        hands_over: Whether a decode node loads a prompt from a prefill node now. Raises AssertionError for a
            wrong answer.
    """

    single: Client
    ask_alone: AskAlone
    hands_over: Callable[[Service, Service, list[int]], bool]


def reference_engine(single: Client) -> Engine:
    def hands_over(prefill: Service, decode: Service, prompt: list[int]) -> bool:
        asked = {"max_tokens": 1, "kv_transfer_params": DO_REMOTE_DECODE}
        params = Client(prefill.process).complete(prompt, **asked).body["kv_transfer_params"]
        wanted = {"max_tokens": 4, "ignore_eos": True, "logprobs": 0, "kv_transfer_params": params}
        reply = Client(decode.process).complete(prompt, **wanted)
        if reply.status != 200 or reply.transfer.get("error", "nothing was loaded"):
            return False
        assert_answers_like(single, prompt, reply.answer, 4, ignore_eos=True)
        return True

    return Engine(single, ask_alone(single, ignore_eos=True), hands_over)


class Soak:
    """Faults and requests for a fleet, drawn from a seed.

    Args:
        fleet: A fleet that has been started.
        samples: A file for what the services hold during the run.
        gap_s: Mean time between two faults.
    """

    def __init__(
        self, fleet: Fleet, engine: Engine, seed: int, seconds: float, samples: Path, gap_s: float = 1.0
    ) -> None:
        self._fleet = fleet
        self._engine = engine
        self._seed = seed
        self._faults = schedule(seed, seconds, fleet.kinds, gap_s)
        self._sampler = Sampler(list(fleet.services.values()), samples, max(1.0, seconds / NUM_SAMPLES))
        self._injected: list[Fault] = []
        self._began = time.monotonic()

    def run(self) -> Report:
        """Run the soak and check its results.

        Raises:
            Exception: A check failed. Notes contain the seed, the faults, and the logs.
        """
        try:
            with self._sampler:
                return self._run()
        except BaseException as error:
            error.add_note(f"seed {self._seed}; the faults:\n" + "\n".join(map(str, self._injected)))
            error.add_note("\n".join(service.logs for service in self._fleet.services.values()))
            raise

    def _run(self) -> Report:
        self._hand_over_in_every_pair("before")
        before = {node.name: node.holdings() for node in self._fleet.nodes}
        report = self._inject_faults()
        logs = [service.logs for service in self._fleet.ours]
        found = violations(report.faults, report.outcomes, self._engine.ask_alone) + logged_errors(logs)
        try:
            self._require_rest(before)
        except Exception as error:  # noqa: BLE001 - a long run tells all that it has found
            found.append(f"afterwards: {error!r}")
        if found:
            raise AssertionError("\n".join([*found, str(report)]))
        return report

    def _require_rest(self, before: Mapping[str, Holdings]) -> None:
        """Check that the fleet works, and holds no more than before the run.

        Raises:
            Exception: It does not.
        """
        self._fleet.wait_ready()
        self._hand_over_in_every_pair("after")
        for node in self._fleet.nodes:
            wait_until(partial(_is_at_rest, node), QUIET_S)
            _require_no_more(node, before[node.name])

    # -- faults and requests ---------------------------------------------------------------------------

    def _inject_faults(self) -> Report:
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
        return Report(self._injected, outcomes)

    def _begin(self, fault: Fault) -> None:
        """Inject a fault, and note its actual time, which is later than planned on a busy machine."""
        self._injected.append(replace(fault, at_s=self._now()))
        self._fleet.begin(fault)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _expect(self, ask: Ask) -> list[int]:
        single = self._engine.single
        return single.complete(ask.prompt, max_tokens=ask.max_tokens, ignore_eos=True).token_ids

    # -- before and after ------------------------------------------------------------------------------

    def _hand_over_in_every_pair(self, when: str) -> None:
        """Check that each decode node can load from each prefill node.

        Raises:
            TimeoutError: A decode node still recomputes what it should load.
        """
        for prefill, decode in product(self._fleet.prefills, self._fleet.decodes):
            pair = f"{when}: from {prefill.name} to {decode.name}"
            wait_until(partial(self._hands_over, prefill, decode, _prompts(pair)), QUIET_S)

    def _hands_over(self, prefill: Service, decode: Service, prompts: Iterator[list[int]]) -> bool:
        return self._engine.hands_over(prefill, decode, next(prompts))


def _prompts(text: str) -> Iterator[list[int]]:
    """Generate prompts of several blocks that are in no cache."""
    return (list(f"{number} {text} {'.' * 200}".encode()) for number in count())


def _is_at_rest(node: Service) -> bool:
    return not held_by(node.process)


def _require_no_more(node: Service, before: Holdings) -> None:
    """Check that a node has released the resources that it used during the run.

    Raises:
        TimeoutError: It has more threads, descriptors or mappings than before.
    """
    try:
        wait_until(lambda: node.holdings().is_within(before), QUIET_S)
    except TimeoutError:
        raise TimeoutError(f"{node.name} holds {node.holdings()}, but held {before} before the run") from None
