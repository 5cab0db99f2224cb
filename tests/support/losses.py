"""Lose real nodes under load: no answer is wrong, no client waits for ever, nothing leaks, and what it costs
is counted.

Clients ask questions whose answers are known. Meanwhile nodes are killed and started again, or frozen for a
while. `make soak LOSSES=60` loses many.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvferry.lab.client import call, events_of, exchange, parsed, totals_of
from kvferry.lab.demo.near_tie import tolerance_of
from kvferry.lab.load import percentile
from kvferry.lab.servers import LaunchedProcess
from tests.support.chaos.services import Holdings, Service
from tests.support.client import Client, wait_until

#: Losses per test.
NUM_LOSSES = int(os.environ.get("KVFERRY_LOSSES", "4"))
SEED = int(os.environ.get("KVFERRY_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 16)
NUM_CLIENTS = 4
#: A client that waits longer between two pieces of an answer counts as hung.
PATIENCE_S = 60.0
#: Between two attempts to connect to a router.
RETRY_S = 0.05
#: Answers per client before the first loss: to learn what nodes hold at rest.
WARM_UP = 4
#: Pieces of answers that arrive between two losses, at most: about as many as the clients' present answers
#: have.
MOST_PIECES = 300
START_S = 400.0
QUIET_S = 40.0

Kind = Literal["kill", "freeze"]
_CONTINUED = re.compile(r"load-(\d+): .*; another node goes on after (\d+) tokens")
_ASKED_AGAIN = re.compile(r"load-(\d+): (?:decode|prefill): ")
#: On a machine that stands still for a moment, a router finds all nodes silent. It says so, and its clients
#: ask again.
_ALL_SILENT = re.compile(r"503: .*can take the request \((?:[^;)]* did not answer within [0-9.]+ s[;)] ?)+\"")


# -- questions and answers ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Told:
    """What a client was told: all of it that must not depend on which node answered.

    Attributes:
        texts, token_ids: By the index of the choice. Token ids are empty if the client has not asked for
            them.
        usage: Tokens of prompt and answer; empty if the client has not asked for them.
        is_one: All parts have the same id, kind, time and model.
    """

    texts: Mapping[int, str]
    token_ids: Mapping[int, Sequence[int]]
    reasons: Sequence[str]
    usage: Mapping[str, int]
    is_one: bool


@dataclass(frozen=True)
class Question:
    """A request, its prompt's length, and the answer of a node without losses."""

    path: str
    body: Mapping[str, Any]
    num_prompt_tokens: int
    expected: Told


def ask(
    port: int,
    path: str,
    body: Mapping[str, Any],
    request_id: str = "same",
    on_piece: Callable[[Mapping[str, Any]], None] = lambda piece: None,
) -> tuple[Told, float]:
    """Ask for an answer. Returns it, and the longest time in seconds between two of its pieces.

    A whole answer is one piece.

    Raises:
        OSError, http.client.HTTPException: The connection broke, or nothing came for `PATIENCE_S`.
        ValueError: The answer is an error, or ends too early.
    """
    headers = {"X-Request-Id": request_id}
    with exchange("POST", f"http://127.0.0.1:{port}", path, body, headers, PATIENCE_S) as response:
        is_stream = response.status == 200 and body.get("stream")
        pieces, times = [], []
        for piece in events_of(response) if is_stream else [parsed(response.read())]:
            if response.status != 200 or "error" in piece:
                raise ValueError(f"{response.status}: {json.dumps(piece)}")
            pieces.append(piece)
            times.append(time.monotonic())
            on_piece(piece)
    return _told(pieces), max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


def _told(pieces: Sequence[Mapping[str, Any]]) -> Told:
    texts: dict[int, str] = {}
    token_ids: dict[int, list[int]] = {}
    reasons: list[str] = []
    usage: dict[str, int] = {}
    for piece in pieces:
        for choice in piece["choices"]:
            message = choice.get("delta") or choice.get("message") or {}
            index = choice["index"]
            texts[index] = texts.get(index, "") + (choice.get("text") or message.get("content") or "")
            token_ids.setdefault(index, []).extend(choice.get("token_ids") or ())
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
        counts = piece.get("usage") or {}
        usage |= {name: counts[name] for name in ("prompt_tokens", "completion_tokens") if name in counts}
    heads = {(piece["id"], piece["object"], piece["created"], piece["model"]) for piece in pieces}
    return Told(texts, token_ids, sorted(reasons), usage, len(heads) == 1)


def learn(single: LaunchedProcess, path: str, body: Mapping[str, Any]) -> Question | None:
    """Return a question with its answer. None if a near-tie of logits allows more than one answer."""
    if body.get("temperature") == 0 and _has_near_tie(single.port, path, body):
        return None
    length, _ = ask(single.port, path, {**body, "stream": False, "stream_options": None, "max_tokens": 1})
    return Question(path, body, length.usage["prompt_tokens"], ask(single.port, path, body)[0])


def _has_near_tie(port: int, path: str, body: Mapping[str, Any]) -> bool:
    """Whether two tokens of a greedy answer are about as likely as each other somewhere."""
    scores = {"logprobs": True, "top_logprobs": 2} if "messages" in body else {"logprobs": 2}
    asked = {**body, "stream": False, "stream_options": None, **scores}
    whole = parsed(call("POST", f"http://127.0.0.1:{port}", path, asked))
    choice = whole["choices"][0]["logprobs"]
    if "messages" in body:
        steps = [[one["logprob"] for one in each["top_logprobs"]] for each in choice["content"]]
    else:
        steps = [list(each.values()) for each in choice["top_logprobs"]]
    likeliest = [sorted(step, reverse=True)[:2] for step in steps]
    return any(len(two) < 2 or two[0] - two[1] < tolerance_of("float32") for two in likeliest)


# -- load --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """How a request ended.

    Attributes:
        port: Of the router that was asked.
        problem: Empty: the client was told what it should be.
        is_refused: No router has accepted it.
    """

    port: int
    question: Question
    problem: str
    longest_pause_s: float = 0.0
    is_refused: bool = False


class Load:
    """Clients that ask one question after the other until `stop`.

    Each request has a cache salt of its own, so that no node has computed its prompt before.

    Args:
        ports: Of the routers. A client whose router fails it goes on with the next one, and repeats no
            request but one that the router has not accepted.
    """

    def __init__(self, ports: Sequence[int], questions: Sequence[Question]) -> None:
        self._ports, self._questions = ports, questions
        self._is_over = threading.Event()
        self._changed = threading.Condition()
        self._num_pieces = self._num_asked = 0
        self.outcomes: dict[int, Outcome] = {}
        self._threads = [threading.Thread(target=self._run, args=(client,)) for client in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Wait for the requests in flight."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
            assert not thread.is_alive(), "a client still waits for an answer"

    def await_pieces(self, num: int) -> None:
        """Wait until so many further pieces have arrived."""
        with self._changed:
            wanted = self._num_pieces + num
            assert self._changed.wait_for(lambda: self._num_pieces >= wanted, PATIENCE_S), "no answer goes on"

    def await_answers(self, num: int) -> None:
        """Wait until so many further requests have ended."""
        with self._changed:
            wanted = len(self.outcomes) + num
            assert self._changed.wait_for(lambda: len(self.outcomes) >= wanted, PATIENCE_S), "no answer ends"

    def _run(self, client: int) -> None:
        ports = itertools.cycle(self._ports)
        port = next(itertools.islice(ports, client % len(self._ports), None))
        while not self._is_over.is_set():
            with self._changed:
                number, self._num_asked = self._num_asked, self._num_asked + 1
            question, deadline = self._questions[number % len(self._questions)], time.monotonic() + PATIENCE_S
            while (outcome := self._carry_out(port, number, question)).is_refused:
                port = next(ports)
                if time.monotonic() > deadline:
                    break
                time.sleep(RETRY_S)
            if outcome.problem:
                port = next(ports)
                # The port of a process that is killed may be open for a moment longer than its connections.
                time.sleep(RETRY_S)
            with self._changed:
                self.outcomes[number] = outcome
                self._changed.notify_all()

    def _carry_out(self, port: int, number: int, question: Question) -> Outcome:
        body = {**question.body, "cache_salt": f"{SEED}-{number}"}
        try:
            told, pause_s = ask(port, question.path, body, f"load-{number}", self._note_piece)
        except (OSError, http.client.HTTPException, ValueError) as error:
            kind = "hung" if isinstance(error, TimeoutError) else "lost"
            is_refused = (
                isinstance(error, ConnectionRefusedError)
                or "the router is draining" in str(error)
                or bool(_ALL_SILENT.match(str(error)))
            )
            return Outcome(port, question, f"{kind}: {type(error).__name__}: {error}", is_refused=is_refused)
        is_right = told == question.expected
        return Outcome(port, question, "" if is_right else f"wrong: {told}, not {question.expected}", pause_s)

    def _note_piece(self, piece: Mapping[str, Any]) -> None:
        with self._changed:
            self._num_pieces += 1
            self._changed.notify_all()


# -- nodes -------------------------------------------------------------------------------------------


def computed_tokens(process: LaunchedProcess) -> float:
    """Return how many prompt tokens a reference node, or a server of vLLM, has computed itself."""
    values = metrics_of(process)
    if "kvferry_engine_prompt_tokens_total" in values:
        kinds = ("prompt", "cached", "loaded")
        whole, *others = (values[f"kvferry_engine_{kind}_tokens_total"] for kind in kinds)
        return whole - sum(others)
    return values.get("vllm:prompt_tokens_by_source_total local_compute", 0.0)


def metrics_of(process: LaunchedProcess) -> dict[str, float]:
    """Return the sums of a page of metrics; see `totals_of`."""
    return totals_of(Client(process).get("/metrics")[1].decode())


#: Gauges of either engine and of the connector that are 0 at rest.
_AT_REST = (
    *(f"kvferry_engine_{state}_requests" for state in ("waiting", "loading", "running", "offered")),
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("kvferry_live_leases", "kvferry_live_loads"),
)


def held_by(process: LaunchedProcess) -> dict[str, float]:
    """Return what a node holds that it should not hold at rest: requests, blocks, offers and loads."""
    values = metrics_of(process)
    held = {name: values[name] for name in _AT_REST if values.get(name)}
    missing = values.get("kvferry_engine_blocks", 0) - values.get("kvferry_engine_free_blocks", 0)
    return {**held, "blocks": missing} if missing else held


# -- losses ------------------------------------------------------------------------------------------


@dataclass
class Fleet:
    """Nodes, those of them that are lost, and the router before them.

    Attributes:
        log: The router's, with all of its lines.
        role: In which the router knows those that are lost.
    """

    nodes: Sequence[Service]
    mortals: Sequence[Service]
    router: Service
    log: Path
    role: str = "decode"

    def states(self) -> dict[str, dict[str, Any]]:
        """Return what the router knows of the nodes that are lost, by URL."""
        found = json.loads(Client(self.router.process).get("/nodes")[1])["nodes"]
        return {node["url"]: node for node in found if node["role"] == self.role}

    def is_ready(self, nodes: Iterable[Service]) -> bool:
        """Whether the router may send requests to nodes, and knows what they are, so that answers can go on
        there.
        """
        states = [self.states()[node.process.url] for node in nodes]
        return all(each["state"] == "ready" and each["models"] and each["kv_role"] for each in states)

    def await_ready(self) -> None:
        """Wait until the router has found all nodes that may be lost."""
        wait_until(lambda: self.is_ready(self.mortals), START_S)

    def await_busy(self) -> list[Service]:
        """Wait until some nodes that may be lost have a request; return them."""
        busy: list[Service] = []

        def are_some_busy() -> bool:
            states = self.states()
            busy[:] = [node for node in self.mortals if states[node.process.url]["in_flight"]]
            return bool(busy)

        wait_until(are_some_busy)
        return busy


@dataclass
class Report:
    """What a number of losses has cost.

    Attributes:
        num_known: Number of a stream that went on at another node → how many tokens that node was told.
        repeated: Numbers of the other requests that a second node was asked for.
        pauses_s: The longest pause of each continued stream.
        usual_pauses_s: The same for the other streams.
    """

    kind: Kind
    num_losses: int = 0
    num_answers: int = 0
    num_known: Mapping[int, int] = field(default_factory=dict)
    repeated: frozenset[int] = frozenset()
    pauses_s: list[float] = field(default_factory=list)
    usual_pauses_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def read_log(self, log: str) -> None:
        """Take in what the router has logged."""
        self.num_known = {int(number): int(known) for number, known in _CONTINUED.findall(log)}
        self.repeated = frozenset(int(number) for number in _ASKED_AGAIN.findall(log)) - self.num_known.keys()

    def read(self, outcomes: Mapping[int, Outcome]) -> None:
        """Take in how requests have ended, after the log."""
        self.num_answers = len(outcomes)
        for number, one in outcomes.items():
            if one.problem:
                self.problems.append(f"{one.problem} (load-{number})")
            elif number in self.num_known:
                self.pauses_s.append(one.longest_pause_s)
            elif one.question.body.get("stream") and number not in self.repeated:
                self.usual_pauses_s.append(one.longest_pause_s)

    def __str__(self) -> str:
        known = self.num_known.values()
        words = ("wrong", "lost", "hung", "leak")
        found = [
            f"{self.num_losses} x {self.kind}: {self.num_answers} answers",
            f"{len(known)} streams went on after {min(known, default=0)} to {max(known, default=0)} tokens",
            f"{len(self.repeated)} other requests were repeated",
            ", ".join(f"{word} {sum(one.startswith(word) for one in self.problems)}" for word in words),
            f"longest pause of a stream that went on: {_spread(self.pauses_s)}; of the others: {_spread(self.usual_pauses_s)}",
        ]
        return "\n  ".join(found)


def _spread(seconds: Sequence[float]) -> str:
    median, most, longest = (1e3 * percentile(seconds, share) for share in (0.5, 0.9, 1.0))
    return f"median {median:.0f}, 90 % {most:.0f}, longest {longest:.0f} ms"


def lose_nodes(
    fleet: Fleet,
    questions: Sequence[Question],
    kind: Kind,
    num_losses: int,
    is_enough: Callable[[Report], object],
    *,
    most_pieces: int = MOST_PIECES,
    before_end: Callable[[Service], None] = lambda node: None,
) -> Report:
    """Lose nodes under load: each time a drawn number of pieces has arrived, one of those that have a
    request.

    Args:
        is_enough: Whether the losses have done what the test is about. Which requests a node has when it is
            lost is left to chance; so more nodes are lost until they have, at most four times as many.
        before_end: Called just before a node is killed.

    Returns:
        What happened. It has a problem for each answer that is not as it should be, and for what is left on a
        node.
    """
    drawn, report = random.Random(SEED), Report(kind)
    _loaded(fleet, questions, lambda load: load.await_answers(WARM_UP * NUM_CLIENTS))
    _connect_all(fleet)
    wait_until(lambda: not any(held_by(node.process) for node in fleet.nodes), QUIET_S)
    started = len(fleet.log.read_text())
    everything = (*fleet.nodes, fleet.router)
    before = {service.name: service.holdings() for service in everything}

    def lose(load: Load) -> None:
        while report.num_losses < num_losses or (
            report.num_losses < 4 * num_losses and not is_enough(report)
        ):
            load.await_pieces(drawn.randrange(1, most_pieces))
            _lose_one(fleet, drawn.choice(fleet.await_busy()), kind, before_end)
            report.num_losses += 1
            report.read_log(fleet.log.read_text()[started:])
        load.await_answers(NUM_CLIENTS)

    outcomes = _loaded(fleet, questions, lose)
    report.read_log(fleet.log.read_text()[started:])
    report.read(outcomes)
    report.problems += leaks(everything, before)
    return report


def _connect_all(fleet: Fleet) -> None:
    """Hand a cache over from each prefill node to each decode node.

    A connection stays. Which ones the load needs is left to chance, and is no leak.
    """
    nodes = {node.process.url: Client(node.process) for node in fleet.nodes}
    found = json.loads(Client(fleet.router.process).get("/nodes")[1])["nodes"]
    urls = {role: [node["url"] for node in found if node["role"] == role] for role in ("prefill", "decode")}
    for producer, consumer in itertools.product(urls["prefill"], urls["decode"]):
        if producer != consumer:
            prompt = f"From {producer} to {consumer} at {time.monotonic()}."
            offer = nodes[producer].offer(prompt)
            nodes[consumer].complete(prompt, max_tokens=1, kv_transfer_params=offer)


def _loaded(
    fleet: Fleet, questions: Sequence[Question], during: Callable[[Load], None]
) -> Mapping[int, Outcome]:
    load = Load([fleet.router.port], questions)
    try:
        during(load)
    finally:
        load.stop()
    return load.outcomes


def _lose_one(fleet: Fleet, node: Service, kind: Kind, before_end: Callable[[Service], None]) -> None:
    if kind == "kill":
        before_end(node)
        node.kill()
        node.start()
        node.wait_ready(START_S)
    else:
        node.pause()
        try:
            wait_until(lambda: not fleet.is_ready([node]))
        finally:
            node.go_on()
        wait_until(lambda: fleet.is_ready([node]))
    fleet.await_ready()


def leaks(services: Sequence[Service], before: Mapping[str, Holdings]) -> list[str]:
    """Say what services hold at rest: requests, blocks, offers, and other resources than they held before."""
    found = _found_at_rest(
        lambda: [f"leak: {each.name} holds {held}" for each in services if (held := held_by(each.process))]
    )
    # Without further requests from here. vLLM answers `/metrics` in a thread of a pool: if we and the router
    # ask at once, it starts another one, which ends only after 10 s without such a meeting.
    found += _found_at_rest(
        lambda: [
            f"leak: {each.name} holds {now}, but held {before[each.name]}"
            for each in services
            if not (now := each.holdings()).is_within(before[each.name])
        ]
    )
    if found:
        print("\n".join(each.inventory() for each in services))
    return found


def _found_at_rest(look: Callable[[], list[str]]) -> list[str]:
    """Look for leaks until there are none; return those that are left after `QUIET_S`."""
    deadline = time.monotonic() + QUIET_S
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found
