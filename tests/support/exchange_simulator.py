"""Try a request's exchange with every order of answers, losses, time-outs and leaving clients, drawn from a
seed.

A `Schedule` stands for the nodes, the client and the part of the router that does the actions. It draws what
happens next among all that can, and checks after each step what `router/answer/exchange.py` promises. Nothing
sleeps, and a seed repeats a schedule exactly. `exchange_states` lets the same schedules draw everything that
can be drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from kvferry.router.answer import exchange as does
from kvferry.router.answer.beginnings import OtherTokenError
from kvferry.router.answer.exchange import MAX_LOST, Action, Actions, Begun, Exchange, State
from kvferry.router.choice.ways import Offer
from kvferry.router.http.errors import ApiError
from kvferry.router.http.sse import DONE, Event, events_of

from .explore import PromiseBroken

T = TypeVar("T")
#: How a node ends a stream before its answer's end, without breaking the connection.
Fault = Literal["closed", "done", "aborted", "error"]
FAULTS: tuple[Fault, ...] = get_args(Fault)
HEADERS = {"X-Request-Id": "r"}
ERROR = Event(b'data: {"error": {"message": "the load failed"}}\n\n')
COMMENT = Event(b": still here\n\n")
ABORT = Event(b'data: {"choices": [{"finish_reason": "abort"}]}\n\n')
#: What a node answers.
NUM_TOKENS = 4
REASONS = [b"null"] * (NUM_TOKENS - 1) + [b'"length"']
ANSWER = [
    Event(b'data: {"n": "%d", "choices": [{"finish_reason": %s}]}\n\n' % (number, reason))
    for number, reason in enumerate(REASONS)
]
TOKENS = {event.raw for event in ANSWER}
#: What a node sends for that, because the router asks for the ids of tokens.
SENT = [Event(event.raw.replace(b"}]}", b', "token_ids": [7]}]}')) for event in ANSWER]


def usage(num_tokens: int) -> Event:
    """Return the counts that follow an answer of this many tokens."""
    return Event.of({"choices": [], "usage": {"completion_tokens": num_tokens}})


def broken_off(how: Fault, sent: Sequence[Event], *, wants_usage: bool) -> list[Event]:
    """Return the stream of a node that has sent so much of its answer."""
    num_tokens = sum(b"token_ids" in event.raw for event in sent)
    counts = [usage(num_tokens)] if wants_usage else []
    ends: Mapping[Fault, list[Event]] = {
        "closed": [],
        "done": [COMMENT, *counts, DONE],
        "aborted": [ABORT, DONE],
        "error": [ERROR, DONE],
    }
    return [*sent, *ends[how]]


@dataclass
class Told:
    """What the client has of an answer.

    Attributes:
        is_other: The next node goes on otherwise than the one before had begun to.
        is_told_whole: The next node is told all tokens.
    """

    num_tokens: int = 0
    is_other: bool = False
    is_told_whole: bool = True

    @property
    def is_over(self) -> bool:
        return self.num_tokens == NUM_TOKENS

    def can_continue_at(self, abilities: bool) -> bool:
        return abilities

    def continued(self) -> Callable[[Event], Iterable[Event]]:
        def change(event: Event) -> Iterable[Event]:
            if self.is_other:
                raise OtherTokenError
            return (event,)

        return change

    def add(self, token_ids: Sequence[int], event: Event) -> None:
        self.num_tokens += len(token_ids)

    def usage(self) -> Mapping[str, int]:
        return {"completion_tokens": self.num_tokens}


@dataclass(eq=False)
class Node:
    """A node. `abilities`: it can go on with an answer."""

    role: str
    number: int
    abilities: bool = True


class Draws:
    """Decides what happens, from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def chance(self, p: float) -> bool:
        """Whether something happens that has this probability."""
        return self._random.random() < p

    def fault(self, p: float) -> bool:
        """The same for what a node, a client or an operator does to a request that would go on well."""
        return self.chance(p)

    def pick(self, options: Sequence[T]) -> T:
        """One of them."""
        return self._random.choice(options)

    def part(self, least: int, most: int) -> int:
        """How many of `most` things come at once."""
        return self._random.randint(least, most)


@dataclass(frozen=True)
class Setup:
    """What a schedule begins with.

    Attributes:
        abilities: By decode node: it can go on with an answer.
        may_be_at_once, may_be_local: Ways in which a request may be placed, apart from in turn.
        follows: Another node could go on with an answer.
        wants_usage: The client has asked for the counts of tokens.
        p_loss, p_stop, p_leave: Of a node's loss and of an answer's stop at each step, and of a client that
            leaves.
    """

    num_prefills: int
    abilities: tuple[bool, ...]
    may_be_at_once: bool
    may_be_local: bool
    may_decode_alone: bool
    follows: bool
    is_stream: bool
    wants_usage: bool
    p_loss: float
    p_stop: float
    p_leave: float

    @classmethod
    def drawn(cls, draws: Draws) -> Setup:
        """Draw one."""
        return cls(
            num_prefills=draws.pick((1, 2)),
            abilities=tuple(draws.chance(0.8) for _ in range(draws.pick((1, 2, 3)))),
            may_be_at_once=draws.chance(0.6),
            may_be_local=draws.chance(0.3),
            may_decode_alone=draws.chance(0.3),
            follows=draws.chance(0.8),
            is_stream=draws.chance(0.8),
            wants_usage=draws.chance(0.5),
            p_loss=draws.pick((0.0, 0.2, 0.5)),
            p_stop=draws.pick((0.0, 0.3, 0.6)),
            p_leave=draws.pick((0.0, 0.0, 0.05)),
        )


@dataclass
class Schedule:
    """One request, and all that becomes of it.

    Attributes:
        kind: The exchange to try.
    """

    setup: Setup
    drawn: Draws
    kind: type[Exchange] = Exchange
    received: list[Event] = field(default_factory=list)
    ends: list[Action] = field(default_factory=list)
    settled: dict[int, str] = field(default_factory=dict)
    released: list[Any] = field(default_factory=list)
    opened: list[Offer] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)  # offers of answers that were stopped
    drains: set[Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        setup = self.setup
        self.prefills: list[Any] = [Node("prefill", number) for number in range(setup.num_prefills)]
        self.decodes: list[Any] = [
            Node("decode", number, is_able) for number, is_able in enumerate(setup.abilities)
        ]
        self.exchange = self.kind(
            "/v1/completions",
            {"stream": setup.is_stream, "stream_options": {"include_usage": setup.wants_usage}},
            HEADERS,
            explain=lambda decode, prefill: "",
        )
        self.prefill: does.AskPrefill | None = None
        self.decode: does.AskDecode | None = None
        self.stream: list[Event] | None = None  # what is left of it
        self.breaks_off = False  # it lacks its end
        self.lost_decodes: set[Node] = set()
        self.lost_prefills: set[Node] = set()
        self.num_lost = 0  # nodes that had the request, of both roles
        self.has_left = False
        self.has_failed_at_once = False
        self.may_fail = ""  # why an error is right
        self.has_streamed = False

    # -- running -------------------------------------------------------------------------------------

    def promise(self, what: str, *, kept: bool) -> None:
        if not kept:
            raise PromiseBroken(what, f"{self.exchange!r}, {self.setup}")

    def run(self) -> None:
        """Draw steps until nothing can happen any more, and check what is left."""
        self.promise("a request ends", kept=not self.go(200))

    def go(self, num_steps: int) -> bool:
        """Begin, and draw up to this many steps. Stop when nothing more can happen.

        Returns:
            Whether all steps were drawn. If not, the end was checked.

        Raises:
            PromiseBroken: a promise does not hold, or a state changed in a way that is in no table.
        """
        try:
            self.do(self.exchange.begin())
            goes_on = all(self.step() for _ in range(num_steps))
            if not goes_on:
                self.check_end()
        except PromiseBroken:
            raise
        except AssertionError as error:
            raise PromiseBroken(str(error), f"{self.exchange!r}, {self.setup}") from error
        return goes_on

    def step(self) -> bool:
        """Draw what happens next. False: nothing can."""
        steps = [step for step in (self.prefill_step(), self.decode_step()) if step is not None]
        if not steps:
            return False
        if not self.drawn.fault(self.setup.p_leave):
            self.do(self.drawn.pick(steps)())
        elif self.drawn.chance(0.5):
            self.has_left = True
            self.do(self.exchange.client_left())
        else:
            self.may_fail = "too late"
            self.do(self.exchange.failed(ApiError(504, "too late", kind="timeout_error")))
        return True

    def check_end(self) -> None:
        state = self.exchange.state
        self.promise("a request ends", kept=state is State.ENDED)
        self.promise(
            "the client gets exactly one end",
            kept=len(self.ends) == (0 if self.has_left and not self.ends else 1),
        )
        self.promise(
            "no request to a node outlasts the exchange", kept=self.prefill is None and self.decode is None
        )
        for offer in self.opened:
            result = self.settled.get(offer.params["n"])
            self.promise("every offer is settled", kept=result is not None)
            is_used = result in ("loaded", "none", "unknown")
            self.promise("an offer that no node loads is released", kept=is_used or offer in self.released)
            is_loaded = result in ("loaded", "none")
            self.promise(
                "an offer that was loaded is not released", kept=not is_loaded or offer not in self.released
            )
        used = {offer.params.get("n") for offer in (*self.opened, *self.released)}
        self.promise("a stopped answer is loaded or released", kept=used.issuperset(self.stopped))
        self.check_bytes()

    def check_bytes(self) -> None:
        is_whole = bool(self.ends) and isinstance(self.ends[0], does.End)
        got = [event.raw for event in self.received if event.raw not in (ERROR.raw, COMMENT.raw)]
        counts = [usage(NUM_TOKENS)] if self.setup.wants_usage else []
        is_cut = ERROR in self.received  # the node has given the answer up, and no other one could go on
        expected = [event.raw for event in (*ANSWER, *counts, DONE)]
        part = got[:-1] if is_cut and got[-1:] == [DONE.raw] else got
        is_right = part == expected[: len(part)] if is_cut or not is_whole else got == expected
        self.promise("the client gets each byte of one answer, once and in order", kept=is_right)

    # -- actions -------------------------------------------------------------------------------------

    def do(self, actions: list[Action]) -> None:
        left = list(actions)
        while left:
            left += self.do_one(left.pop(0))

    def do_one(self, action: Action) -> list[Action]:
        is_asking = isinstance(action, does.Place | does.AskPrefill | does.ChooseDecode | does.AskDecode)
        has_ended = self.exchange.state is State.ENDED
        self.promise("nothing is asked of a node after the end", kept=not (is_asking and has_ended))
        is_over = self.num_lost >= MAX_LOST
        self.promise(
            "a request that was with three lost nodes is given to no other", kept=not (is_asking and is_over)
        )
        exchange = self.exchange
        match action:
            case does.Place():
                return self.place()
            case does.AskPrefill(at):
                self.promise("one prefill at a time", kept=self.prefill is None)
                self.promise(
                    "both are not asked at once again after that has failed",
                    kept=at is None or not self.has_failed_at_once,
                )
                self.prefill = action
            case does.ChooseDecode():
                return self.choose()
            case does.AskDecode():
                node: Any = action.node
                after: Any = action.after
                self.promise("one decode at a time", kept=self.decode is None)
                self.promise(
                    "the second half follows the tokens that the client has",
                    kept=exchange.sent.beginning is None or after is not None,
                )
                num_received = sum(event.raw in TOKENS for event in self.received)
                self.promise(
                    "a node that goes on knows all that the client has",
                    kept=after is None or after.num_tokens == num_received,
                )
                self.promise(
                    "no node is asked to go on with an answer that is over",
                    kept=after is None or not after.is_over,
                )
                self.promise("a node that was lost is not asked again", kept=node not in self.lost_decodes)
                self.promise(
                    "a node loads only what it is told",
                    kept=not self.is_stopped(action) or (after is not None and after.is_told_whole),
                )
                self.decode, self.stream = action, None
                exchange.tried_decode[node] = None
            case does.EndPrefill():
                self.prefill = None
            case does.EndDecode():
                self.decode = self.stream = None
            case does.Opened(offer):
                self.opened.append(offer)
            case does.Settled(offer, _, result):
                self.promise(
                    "an offer is settled once",
                    kept=offer in self.opened and offer.params["n"] not in self.settled,
                )
                self.settled[offer.params["n"]] = result
            case does.Release(offer):
                self.released.append(offer)
            case does.Note("answer moved"):
                lost: Any = exchange.decode
                self.lost_decodes.add(lost)
            case does.GaveUp(node):
                self.lost_decodes.add(node)  # type: ignore[arg-type]
                exchange.tried_decode[node] = RuntimeError("gave up")  # type: ignore[assignment]
            case does.Send(events):
                self.promise("nothing is sent after the end", kept=not self.ends)
                has_token = any(event.raw in TOKENS for event in self.received)
                self.promise(
                    "an error after a token moves the answer",
                    kept=ERROR not in events or not has_token or exchange.sent.beginning is None,
                )
                self.received += events
            case does.Begin():
                self.promise("a stream begins once", kept=not self.has_streamed)
                self.has_streamed = True
            case does.End() | does.SendWhole() | does.Fail():
                self.promise("the client gets exactly one end", kept=not self.ends)
                self.ends.append(action)
                is_whole = not isinstance(action, does.SendWhole) or action.payload == b"{}"
                self.promise("a whole answer is not cut off", kept=is_whole)
                if isinstance(action, does.Fail):
                    self.promise("an error is given only if no node could answer", kept=bool(self.may_fail))
        return []

    def place(self) -> list[Action]:
        exchange = self.exchange
        untried = self.untried()
        last: Any = exchange.moved_from
        if not untried and last is not None and last not in self.lost_decodes:
            return exchange.placed_at(last)
        if not untried:
            return self.without_decode()
        if self.setup.may_be_local and self.drawn.chance(0.5):
            fits: list[Any] = [each for each in untried if exchange.sent.beginning is None or each.abilities]
            if fits:
                return exchange.placed_at(self.drawn.pick(fits))
        if not (exchange.may_ask_both and self.setup.may_be_at_once):
            return exchange.placed()
        node: Any = self.drawn.pick(self.prefills)
        offer = Offer(node, {"n": len(self.opened)}, f"name{len(self.opened)}")
        decode: Any = self.drawn.pick(untried)
        return exchange.placed(offer, decode)

    def choose(self) -> list[Action]:
        exchange = self.exchange
        fits = self.untried()
        if exchange.sent.beginning is not None:
            fits = [node for node in fits if node.abilities]
        last: Any = exchange.moved_from
        if (
            not fits
            and exchange.state is not State.MOVING
            and last is not None
            and last not in self.lost_decodes
        ):
            return exchange.decode_chosen(last)
        if not fits:
            return self.without_decode()
        node: Any = self.drawn.pick(fits)
        return exchange.decode_chosen(node)

    def untried(self) -> list[Node]:
        tried = self.exchange.tried_decode
        return [node for node in self.decodes if node not in tried and node not in self.drains]

    def is_stopped(self, asked: does.AskDecode) -> bool:
        """Whether a node is asked to load an answer that another one has stopped."""
        return asked.params is not None and asked.params["n"] in self.stopped

    def without_decode(self) -> list[Action]:
        able = (node for node in self.decodes if node.abilities or self.exchange.sent.beginning is None)
        if self.lost_decodes.issuperset(able):
            self.may_fail = "every decode node was lost"
        return self.exchange.no_decode_node(ApiError(503, "no decode node", kind="x"))

    # -- what nodes do -------------------------------------------------------------------------------

    def prefill_step(self) -> Callable[[], list[Action]] | None:
        return None if self.prefill is None else self.prefill_ends

    def prefill_ends(self) -> list[Action]:
        asked, exchange, self.prefill = self.prefill, self.exchange, None
        assert asked is not None
        if asked.node is None:
            left = [node for node in self.prefills if node not in exchange.tried_prefill]
            if not left:
                alone = self.setup.may_decode_alone and any(
                    node not in exchange.tried_decode for node in self.decodes
                )
                if not alone and self.lost_prefills.issuperset(self.prefills):
                    self.may_fail = "every prefill node was lost"
                return exchange.no_prefill_node(ApiError(503, "none", kind="x"), may_decode_alone=alone)
            node: Any = self.drawn.pick(left)
        else:
            node = asked.node
        if self.drawn.fault(self.setup.p_loss):
            if self.drawn.chance(0.2):
                if exchange.state in (State.PREFILLING, State.RENDEZVOUS):
                    self.may_fail = "a prefill node has refused the request"
                return exchange.prefill_refused(ApiError(400, "no", kind="x"))
            self.lost_prefills.add(node)
            if asked.node is None:
                exchange.tried_prefill[node] = RuntimeError("lost")  # type: ignore[assignment]
            self.has_failed_at_once |= exchange.state is State.RENDEZVOUS
            return exchange.prefill_lost(RuntimeError("lost"), is_lost=self.loses())
        if asked.node is None and self.drawn.chance(0.1):
            return exchange.prefill_answered(None)
        return exchange.prefill_answered(Offer(node, {"n": len(self.opened)}))

    def loses(self) -> bool:
        """Note that a node is lost while it has the request."""
        self.num_lost += 1
        self.promise("a request ends three nodes at most", kept=self.num_lost <= MAX_LOST)
        if self.num_lost == MAX_LOST:
            self.may_fail = "it may be what ends its nodes"
        return True

    def decode_step(self) -> Callable[[], list[Action]] | None:
        if self.decode is None:
            return None
        return self.decode_begins if self.stream is None else self.decode_goes_on

    def decode_begins(self) -> list[Action]:
        asked, exchange = self.decode, self.exchange
        assert asked is not None
        node: Any = asked.node
        if self.drawn.fault(self.setup.p_loss):
            self.decode = None
            self.lost_decodes.add(node)
            exchange.tried_decode[node] = RuntimeError("lost")  # type: ignore[assignment]
            return exchange.decode_lost(RuntimeError("lost"), is_lost=self.loses())
        if self.is_stopped(asked) and self.drawn.fault(0.2):
            self.lost_decodes.add(node)  # a server whose policy is to fail such a request
            return exchange.decode_answered(Begun(500, {}, False, b"{}", (), "failed"))
        result: Any = self.drawn.pick(("loaded", "failed", "none", "unknown"))
        if not exchange.is_stream:
            if self.drawn.fault(0.2):
                return exchange.decode_answered(Begun(200, {}, False, b"{", (), result, objection="cut off"))
            return exchange.decode_answered(Begun(200, {}, False, b"{}", (), result))
        told: Any = asked.after
        if told is not None and told.num_tokens > 0 and self.drawn.fault(0.05):
            told.is_other, self.may_fail = True, "another node chose other tokens"
        told_tokens = 0 if told is None else told.num_tokens
        events = SENT[told_tokens:]
        self.stream = [*events, *([usage(NUM_TOKENS)] if self.setup.wants_usage else []), DONE]
        self.breaks_off = self.drawn.fault(0.2)
        if self.breaks_off:
            how = self.drawn.pick(FAULTS)
            # After the last token, what looks like an end is one.
            most = len(events) if how in ("closed", "error") else NUM_TOKENS - told_tokens - 1
            sent = events[: self.drawn.part(0, most)]
            self.stream = broken_off(how, sent, wants_usage=self.setup.wants_usage)
        if not self.stream:
            self.decode = None  # such an answer is none for what reads it
            self.lost_decodes.add(node)
            exchange.tried_decode[node] = RuntimeError("empty")  # type: ignore[assignment]
            return exchange.decode_lost(RuntimeError("empty"))
        num = self.drawn.part(1, len(self.stream))
        begun, self.stream = self.stream[:num], self.stream[num:]
        follows: Any = Told() if self.setup.follows and node.abilities else None  # no other node could go on
        return exchange.decode_answered(Begun(200, {}, True, b"", begun, result, beginning=follows))

    def decode_goes_on(self) -> list[Action]:
        assert self.stream is not None
        if self.breaks_off and self.exchange.sent.beginning is None:
            self.may_fail = "the node has ended the answer in the middle"
        if not self.stream:
            return self.exchange.decode_ended()
        if self.drawn.fault(self.setup.p_loss / 3):
            if self.exchange.sent.beginning is None:
                self.may_fail = "the answer was lost in the middle"
            error = ApiError(502, "lost in the middle", kind="server_error")
            return self.exchange.decode_broke(error, is_lost=self.loses())
        num = self.drawn.part(1, len(self.stream))
        events, self.stream = self.stream[:num], self.stream[num:]
        if self.may_stop(events):
            events[-1], self.stream, self.breaks_off = self.stopped_at(events[-1]), [], False
        return arrived(self.exchange, events)

    def may_stop(self, events: Sequence[Event]) -> bool:
        """Draw whether the node stops the answer with the last of these events, for another node to go on
        with.
        """
        told: Any = self.exchange.sent.beginning
        num_sent = sum(b"token_ids" in event.raw for event in events)
        is_last = told is not None and told.num_tokens + num_sent >= NUM_TOKENS
        is_token = b"token_ids" in events[-1].raw
        return told is not None and is_token and not is_last and self.drawn.fault(self.setup.p_stop)

    def stopped_at(self, event: Event) -> Event:
        node, told = self.exchange.decode, self.exchange.sent.beginning
        self.drains = {node} if self.drawn.chance(0.7) else set()  # type: ignore[arg-type]
        told.is_told_whole = self.drawn.chance(0.8)  # type: ignore[union-attr,misc]
        raw = event.raw.replace(b'"finish_reason": null', b'"finish_reason": "moved"')
        if self.drawn.chance(0.2):
            return Event(raw.replace(b"]}]}", b']}], "kv_transfer_params": null, "metrics": {}}'))
        self.stopped.append(number := 1000 + len(self.stopped))
        return Event(raw.replace(b"]}]}", b']}], "kv_transfer_params": {"n": %d}, "metrics": {}}' % number))


def arrived(exchange: Exchange, events: Sequence[Event]) -> Actions:
    """Give an exchange events as the router does: what only carries more of the answer is passed on as bytes.

    It does so while nothing else is under way, so not with all of them.
    """
    passed = exchange.passed(b"".join(event.raw for event in events)) if len(events) % 2 else None
    if passed is None:
        return exchange.events_arrived(events)
    own, num = passed
    assert num == len(events)
    return [does.Send(events_of(own))]


def run_drawn(seed: int, kind: type[Exchange] = Exchange) -> None:
    """Run a schedule from a seed.

    Raises:
        PromiseBroken: a promise does not hold.
    """
    draws = Draws(seed)
    Schedule(Setup.drawn(draws), draws, kind).run()
