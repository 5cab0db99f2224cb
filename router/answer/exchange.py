"""One request on its way through the nodes: what has happened so far, and what follows from it.

Events come in as calls of `Exchange`, and each returns the actions that follow, in their order; `performance`
does them and reports what comes of it. There is no I/O, clock or task here, so that a simulator can try every
order of answers, losses and leaving clients. `docs/router-design.md` has the table of states.

What must never break: the client gets each byte of one answer, once and in order, and one end. Each offer
that was opened is settled once, and released unless a decode node has it. After the end no node is asked for
anything.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ...connector.p2p.params import RENDEZVOUS
from ..choice.ways import Offer
from ..http.errors import ApiError, unavailable
from ..http.json_body import object_of
from ..http.sse import DONE, Event, events_of
from .beginnings import FOLLOWED_PATHS, Beginning, OtherTokenError, take_token_ids
from .bill import Bill
from .dialects import dialect_of
from .endings import Heard, says_engine_ended, unchanged
from .moves import Stop, stop_of
from .plain import PlainBytes

if TYPE_CHECKING:
    from ..nodes.pool import Tried, UpstreamNode

#: The result of an offer. The decode node reports `loaded`, `failed` or `none` (there was nothing to load).
#: `unknown`: it answered without such a report. `unanswered`: it was lost, it refused the request, or the
#: client left first.
Result = Literal["loaded", "failed", "none", "unknown", "unanswered"]
#: How a decode node got the cache of a prompt.
Source = Literal["rendezvous", "in_turn", "without_offer", "alone"]
#: What the log and the metrics learn.
Fact = Literal[
    "prefill lost",
    "decode lost",
    "prefill lost late",
    "alone",
    "without offer",
    "answer moved",
    "answer stopped",
]
#: The router gives up a request after it has lost this many nodes, because the request may crash them. Three,
#: and not one, because nodes also fail by themselves, and a request that moves to another node should survive
#: that.
MAX_LOST = 3
#: The headers of a node's answer that the client receives.
PASSED_HEADERS = ("Content-Type", "Retry-After", "X-KV-Transfer", "X-Request-Id")
#: Of the events that report on an answer, the last ones are kept; a longer one is not a report. Only the one
#: that ends a stream may be longer: it may repeat the answer.
MAX_TAIL_EVENTS, MAX_TAIL_EVENT_BYTES = 16, 16 << 10
#: The fields that all events of a stream share.
_HEAD = ("id", "object", "created", "model")
#: What another node needs to go on with an answer is read when it is needed. This much of it waits for that.
MAX_UNREAD_BYTES = 64 << 10
_REPORTS = (b'"metrics"', b'"usage"', b'"error"')


class State(enum.Enum):
    """What is under way. `docs/router-design.md` has the table of changes."""

    QUEUED = "queued"
    PREFILLING = "prefilling"
    RENDEZVOUS = "rendezvous"
    DECODING = "decoding"
    CONTINUING = "continuing"
    MOVING = "moving"
    ENDED = "ended"


TRANSITIONS: Mapping[State, frozenset[State]] = {
    State.QUEUED: frozenset(
        {State.PREFILLING, State.RENDEZVOUS, State.DECODING, State.CONTINUING, State.ENDED}
    ),
    State.PREFILLING: frozenset({State.DECODING, State.CONTINUING, State.ENDED}),
    State.RENDEZVOUS: frozenset({State.QUEUED, State.DECODING, State.ENDED}),
    State.DECODING: frozenset({State.QUEUED, State.MOVING, State.ENDED}),
    State.CONTINUING: frozenset({State.QUEUED, State.MOVING, State.ENDED}),
    State.MOVING: frozenset({State.QUEUED, State.CONTINUING, State.ENDED}),
    State.ENDED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Begun:
    """The beginning of a decode node's answer: all of it, or the first events of a stream.

    Attributes:
        result: What became of the offer.
        error: Why the load failed, or the request; empty if neither is said to have.
        beginning: What the client has before the first event of a stream; None if no other node could go on
            with this answer.
        objection: Why a whole answer is none, although its status is 200; empty if it is one.
        content: A whole answer, parsed.
        adds_loads, computes_again: What its node does to its counts; see `Bill.answered`.
    """

    status: int
    headers: Mapping[str, str]
    is_stream: bool
    payload: bytes
    events: Sequence[Event]
    result: Result
    error: str = ""
    beginning: Beginning | None = None
    objection: str = ""
    content: Mapping[str, Any] = field(default_factory=dict)
    adds_loads: bool = False
    computes_again: bool = True


# -- actions -----------------------------------------------------------------------------------------


class Action:
    """What an exchange wants done."""

    __slots__ = ()


class Bookkeeping(Action):
    """What takes no time, and is done even if the client has left before that."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Place(Action):
    """Decide how the request goes on: report `placed`, `placed_at` or `no_decode_node`."""


@dataclass(frozen=True, slots=True)
class AskPrefill(Action):
    """Ask a prefill node to compute the prompt, with these keys of `kv_transfer_params`.

    Attributes:
        node: To be asked, if the decode node is asked at once. None: any that has not been tried.
    """

    node: UpstreamNode | None = None
    wish: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChooseDecode(Action):
    """Choose a decode node: report `decode_chosen` or `no_decode_node`."""


@dataclass(frozen=True, slots=True)
class AskDecode(Action):
    """Ask a decode node for the answer, with the offer of these params, to go on after the beginning that the
    client has.
    """

    node: UpstreamNode
    params: Mapping[str, Any] | None
    after: Beginning | None


@dataclass(frozen=True, slots=True)
class AwaitPrefill(Action):
    """Wait a moment for the end of the request to the prefill node, if it still runs."""


@dataclass(frozen=True, slots=True)
class EndPrefill(Bookkeeping):
    """End the request to the prefill node, if it still runs."""


@dataclass(frozen=True, slots=True)
class EndDecode(Bookkeeping):
    """End the request to the decode node, if it still runs."""


@dataclass(frozen=True, slots=True)
class GaveUp(Bookkeeping):
    """Count that a node has not given all of its answer, and do not ask it again."""

    node: UpstreamNode
    why: str


@dataclass(frozen=True, slots=True)
class Opened(Bookkeeping):
    """Count an offer of its node."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Settled(Bookkeeping):
    """Count what became of an offer, once. The decode node is None if none got the offer."""

    offer: Offer
    decode: UpstreamNode | None
    result: Result


@dataclass(frozen=True, slots=True)
class Explained(Bookkeeping):
    """Report why a load has failed; empty if the node has not said."""

    offer: Offer
    decode: UpstreamNode
    error: str


@dataclass(frozen=True, slots=True)
class Release(Bookkeeping):
    """Tell the prefill node that no node will load its offer."""

    offer: Offer


@dataclass(frozen=True, slots=True)
class Note(Bookkeeping):
    """Tell log and metrics."""

    fact: Fact
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Begin(Action):
    """Begin the client's stream."""

    status: int
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Send(Action):
    """Send events to the client."""

    events: Sequence[Event]


@dataclass(frozen=True, slots=True)
class SendWhole(Action):
    """Send an answer that is no stream, which ends it."""

    status: int
    headers: Mapping[str, str]
    payload: bytes
    content: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class End(Action):
    """End the client's stream."""


@dataclass(frozen=True, slots=True)
class Fail(Action):
    """End with an error: as the whole answer, or as an event if the stream has begun."""

    error: ApiError


Actions = list[Action]


@dataclass(slots=True)
class _Load:
    """What became of the present offer.

    Attributes:
        offer: None: there is none.
        result: None while the offer is open.
        error: Why the load failed; empty if it is not said to have.
    """

    offer: Offer | None
    result: Result | None = None
    error: str = ""


class Sent:
    """What the client has been sent of a stream: for its end, and for another node that goes on.

    Attributes:
        is_complete: The end, so that the client may leave.
        tail: The last events with a report of the node: figures, or an error.
        last: Events with a part of the answer.
        followed: `beginning`, which has not read all of it yet.
    """

    def __init__(self) -> None:
        self.is_complete = False
        self.tail: deque[Event] = deque(maxlen=MAX_TAIL_EVENTS)
        self.last = b""
        self.followed: Beginning | None = None
        self._unread: deque[bytes] = deque()  # by `followed`
        self._num_unread = 0  # bytes

    @property
    def beginning(self) -> Beginning | None:
        """The answer so far, if another node could go on with it. Every further decode node must do that."""
        self._read(0)
        return self.followed

    def follow(self, chunk: bytes) -> None:
        """Keep events for `beginning`."""
        if self.followed is not None:
            self._unread.append(chunk)
            self._num_unread += len(chunk)
            self._read(MAX_UNREAD_BYTES)

    def _read(self, max_bytes: int) -> None:
        """Let the beginning read what was kept, the oldest first, until this much is left."""
        while self._num_unread > max_bytes:
            chunk = self._unread.popleft()
            self._num_unread -= len(chunk)
            assert self.followed is not None, "it was there when this came"
            for event in events_of(chunk):
                _, token_ids = take_token_ids(event, keep=True)
                self.followed.add(token_ids, event)


class Exchange:
    """One request for one answer, or several, to one prompt.

    Args:
        body: What the client sent, as all nodes get it.
        headers: For all nodes. They share one request id, as vLLM's nodes require.
        explain: Says why no cache can be handed over to a node from another one, by what both have said;
            empty if it can.

    Attributes:
        tried_prefill, tried_decode: The nodes that were asked. Those that failed are not asked again.
        may_ask_both: Both nodes may be asked at once. False after that has failed.
        offer, decode: Of the present attempt, and the decode node that was asked last. None: there is none.
        moved_from: The node that has stopped the answer last, so that another one goes on with it. It is the
            last resort, because it still has the cache. None: no node has.
        failure: What ended the answer. None if nothing did.
        lost: Why each node was lost that had the request then, of both roles and over all attempts.
        bill: The counts of tokens that the client is told.
    """

    def __init__(
        self,
        path: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        *,
        explain: Callable[[UpstreamNode, UpstreamNode], str] = lambda decode, prefill: "",
    ) -> None:
        self.path, self.body, self.headers = path, body, headers
        self.tried_prefill: Tried = {}
        self.tried_decode: Tried = {}
        self.state = State.QUEUED
        self.may_ask_both = True
        self.is_alone = False
        self.decode: UpstreamNode | None = None
        self.moved_from: UpstreamNode | None = None
        self.failure: ApiError | None = None
        self.lost: list[Exception] = []
        self.sent = Sent()
        self.dialect = dialect_of(path)
        self.bill = Bill(self.dialect)
        self._explain = explain
        self._plain = PlainBytes(self.dialect.last_events, hides_ids=not self._shows_ids)
        self._heard = self._new_heard()  # from the present decode node
        self._load = _Load(None)

    def __repr__(self) -> str:
        return f"<exchange {self.request_id!r}: {self.state.value}>"

    @property
    def offer(self) -> Offer | None:
        return self._load.offer

    @property
    def request_id(self) -> str:
        return self.headers["X-Request-Id"]

    @property
    def is_stream(self) -> bool:
        """Whether the client wants a stream."""
        return bool(self.body.get("stream"))

    def _new_heard(self) -> Heard:
        own = self.body.get(self.dialect.inside) if self.dialect.inside else self.body
        num = own.get("n") if isinstance(own, dict) else None
        return Heard(num if type(num) is int else 1, self.dialect)

    @property
    def _shows_ids(self) -> bool:
        """Whether the client gets the ids of tokens. vLLM echoes a streamed prompt with its ids."""
        # Only from an answer that is followed were ids asked for that the client has not.
        is_asked = self.body.get("return_token_ids") or self.body.get("echo")
        return bool(is_asked) or self.path not in FOLLOWED_PATHS

    @property
    def source(self) -> Source:
        """How the decode node gets the cache of the prompt."""
        if self.is_alone:
            return "alone"
        if self.offer is None:
            return "without_offer"
        return "rendezvous" if self.offer.name else "in_turn"

    def _move(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self!r} cannot become {state.value}"
        self.state = state

    # -- the beginning of an attempt -----------------------------------------------------------------

    def begin(self) -> Actions:
        """Begin with a request that was let in."""
        return [Place()]

    def placed(self, offer: Offer | None = None, decode: UpstreamNode | None = None) -> Actions:
        """Go on as was decided.

        Args:
            offer: That the prefill node is to make, in a rendezvous. None: a prefill node is asked first.
            decode: That is to claim it.
        """
        self.decode, self._load = None, _Load(offer)
        self.tried_prefill = {}
        self.is_alone = False
        self.bill.begins("prefill")
        if offer is None or decode is None:
            self._move(State.PREFILLING)
            return [AskPrefill()]
        self._move(State.RENDEZVOUS)
        # The prefill node needs its request first.
        ask = AskPrefill(offer.node, {RENDEZVOUS: offer.name})
        return [Opened(offer), ask, self._ask_decode(decode, offer.params, None)]

    def placed_at(self, node: UpstreamNode) -> Actions:
        """Let the node that answers compute the prompt as well."""
        self._load = _Load(None)
        self.is_alone = True
        self.bill.begins("alone")
        self._move(State.DECODING if self.sent.beginning is None else State.CONTINUING)
        return [self._ask_decode(node, None, self.sent.beginning)]

    def _ask_decode(
        self, node: UpstreamNode, params: Mapping[str, Any] | None, after: Beginning | None
    ) -> AskDecode:
        self.decode, self._heard = node, self._new_heard()
        return AskDecode(node, params, after)

    # -- what comes of a prefill ---------------------------------------------------------------------

    def prefill_answered(self, offer: Offer | None) -> Actions:
        """Go on with a prompt that is computed. The offer is None if the node made none."""
        if self.state is not State.PREFILLING:
            return []  # the decode node was asked before, or nothing needs it any more
        self._load.offer = offer
        return [ChooseDecode()] if offer is None else [Opened(offer), ChooseDecode()]

    def prefill_lost(self, error: Exception, *, is_lost: bool = False) -> Actions:
        """Go on without a prefill node that failed; another one may succeed.

        Args:
            is_lost: The node was lost while it had the request, which may be why.
        """
        if is_lost:
            self.bill.lost()
        elif self.state is State.RENDEZVOUS:
            self.bill.no_prefill()
        if self._is_one_too_many(error, is_lost) and self.state in (State.RENDEZVOUS, State.PREFILLING):
            return self._give_up(Note("prefill lost", error))
        if self.state is State.RENDEZVOUS:
            self.may_ask_both = False
            # A decode node that was only waiting for the prefill may be asked again.
            self.tried_decode = {
                node: error for node, error in self.tried_decode.items() if error is not None
            }
            return self._again(Note("prefill lost", error))
        if self.state is not State.PREFILLING:
            return [Note("prefill lost late", error)]
        return [Note("prefill lost", error), AskPrefill()]

    def prefill_refused(self, error: ApiError) -> Actions:
        """End with a prefill node's refusal, which no other node would answer otherwise."""
        if self.state in (State.RENDEZVOUS, State.PREFILLING):
            return self._fail(error)
        return self.prefill_lost(error)

    def no_prefill_node(self, error: ApiError, *, may_decode_alone: bool) -> Actions:
        """Let a decode node compute the prompt, or end."""
        if self.state is not State.PREFILLING:
            return self.prefill_lost(error)
        if not may_decode_alone:
            return self._fail(self._in_the_middle(error))
        self.is_alone = True
        self.bill.no_prefill()
        return [Note("alone", error), ChooseDecode()]

    # -- what comes of a decode ----------------------------------------------------------------------

    def decode_chosen(self, node: UpstreamNode) -> Actions:
        """Ask a decode node, which goes on after what the client has."""
        self._move(State.DECODING if self.sent.beginning is None else State.CONTINUING)
        params = None if self.offer is None else self.offer.params
        return [self._ask_decode(node, params, self.sent.beginning)]

    def no_decode_node(self, error: ApiError) -> Actions:
        """End: no decode node can take the request. One that has stopped the answer may take it back."""
        if self.state is State.MOVING:
            return self._again(Note("decode lost", error))
        return self._fail(self._in_the_middle(error))

    def decode_lost(self, error: Exception, *, is_lost: bool = False) -> Actions:
        """Begin again without a decode node that failed before its answer: the offer is gone with it.

        Args:
            is_lost: As of `prefill_lost`.
        """
        if is_lost:
            self.bill.lost()
        if self._is_one_too_many(error, is_lost):
            return self._give_up(Note("decode lost", error))
        return self._again(Note("decode lost", error))

    def decode_answered(self, begun: Begun) -> Actions:
        """Pass on the beginning of an answer.

        From now on a failure of the prefill is the decode node's concern.
        """
        self._load.error = self._load.error or begun.error
        objection = begun.objection
        if self.sent.beginning is None:
            objection = objection or self._objection_to(begun.events)
        elif begun.status != 200 or not begun.is_stream:
            objection = _not_continued(begun)
        # A node that has answered nothing says nothing of the offer.
        actions = self._settle("unanswered" if objection and begun.result == "unknown" else begun.result)
        if objection:
            self.bill.lost()
            return [*actions, self._gave_up(objection), *self._again(Note("decode lost", _lost(objection)))]
        self.bill.answered(
            begun.result if begun.result in ("loaded", "failed", "none") else "unsaid",
            adds_loads=begun.adds_loads,
            computes_again=begun.computes_again,
            is_continued=self.sent.beginning is not None,
        )
        if self.state is State.RENDEZVOUS:
            self._move(State.DECODING)
        has_failed = begun.is_stream or begun.status >= 500
        if has_failed and not self._goes_on and (explained := self._explained()):
            return actions + self._fail(explained)
        if self.offer is None and not self.is_alone and begun.result != "loaded":
            # A store that both nodes share needs no offer: the decode node finds the prompt there by itself.
            actions.append(Note("without offer"))
        headers = {name: begun.headers[name] for name in PASSED_HEADERS if name in begun.headers}
        if not begun.is_stream:
            headers.setdefault("Content-Type", "application/json")
            return [*actions, *self._end(SendWhole(begun.status, headers, begun.payload, begun.content))]
        if self.sent.beginning is not None:
            self._heard.change = self.sent.beginning.continued()  # before its first event is passed on
        else:
            actions.append(Begin(begun.status, {**headers, "Cache-Control": "no-cache"}))
            self.sent.followed = begun.beginning
        return actions + self.events_arrived(begun.events)

    def events_arrived(self, events: Iterable[Event]) -> Actions:
        """Pass on events of the decode node's stream."""
        actions, sent = Actions(), list[Event]()
        stop: Stop | None = None
        for event in events:
            if why := self._heard.objection(event) or self._error_to_move_for(event):
                return [*self._sent(sent), *self._broke_off(why, is_lost=says_engine_ended(event.content))]
            if self.sent.followed is not None:
                self.bill.heard(event)
                if (stop := stop_of(event)) is not None:
                    event = stop.event
            passed, _ = take_token_ids(event, keep=self._shows_ids)
            try:
                sent += () if passed is None else (event,) if event.is_comment else self._heard.change(passed)
            except OtherTokenError:
                # The node did not choose its last tokens once more, so nothing true can follow them.
                return self._fail(_lost("another node chose other tokens", "in the middle"))
            self.sent.follow(event.raw)
            self._heard.add(event)
            if self._heard.has_said:
                self._forgive()
            if stop is not None or event.is_done:
                break  # a report may follow, which is about a part of the answer
        if any(b'"error"' in event.raw and "error" in event.content for event in sent):
            # vLLM begins a chat's stream before it says that the load has failed.
            actions += self._read_errors(sent)
            if explained := self._explained():
                return actions + self._fail(explained)
        actions += self._sent(sent)
        return actions if stop is None else actions + self._stopped(stop)

    def passed(self, chunk: bytes) -> tuple[bytes, int] | None:
        """Pass on bytes of the decode node's stream that only carry more of the answer.

        Called for every token.

        Args:
            chunk: Whole events.

        Returns:
            What the client gets, and the number of events. None: `events_arrived` has to look at them.
        """
        heard = self._heard
        if not heard.has_said or heard.is_over or heard.change is not unchanged:
            return None
        if (passed := self._plain.passed(chunk)) is None:
            return None
        if b'"finish_reason"' in chunk:
            heard.names_reasons = True
            self.sent.last = chunk
        self.sent.follow(chunk)
        return passed

    def _sent(self, events: Sequence[Event]) -> Actions:
        for event in events:
            is_short = len(event.raw) <= MAX_TAIL_EVENT_BYTES or event.name in self.dialect.last_events
            if is_short and any(word in event.raw for word in _REPORTS):
                self.sent.tail.append(event)
            if b'"finish_reason"' in event.raw:
                self.sent.last = event.raw
            self.sent.is_complete = self.sent.is_complete or self._heard.is_last(event)
        return [Send(events)] if events else []

    def _objection_to(self, events: Sequence[Event]) -> str:
        """Return why a node gives its answer up in the first events of its stream. Empty: it does not."""
        heard = self._new_heard()
        for event in events:
            if heard.is_over:
                break
            if why := heard.objection(event):
                return why
            heard.add(event)
        return ""

    def _error_to_move_for(self, event: Event) -> str:
        """Return the error that an event is, if another node can go on with the answer.

        Before the first token of all it is the client's: a load that failed would fail at the next node as
        well.
        """
        is_error = b'"error"' in event.raw and "error" in event.content
        if not is_error or self.sent.followed is None or not (self._heard.has_said or self._goes_on):
            return ""
        return error_in(event.content) or "the node ended it with an error"

    def _stopped(self, stop: Stop) -> Actions:
        """Let another node go on with an answer that its node has stopped.

        It loads the cache, if it is told all of its tokens.
        """
        assert self.decode is not None, "it has answered"
        assert self.sent.beginning is not None, "it can go on elsewhere"
        self.moved_from, self.may_ask_both = self.decode, False
        note = Note("answer stopped")
        if stop.params is None or not self.sent.beginning.is_told_whole:
            unused = [] if stop.params is None else [Release(Offer(self.decode, stop.params))]
            return [*unused, *self._again(note)]
        ends = self._drop()
        self.bill.begins("moved")
        offer = Offer(self.decode, stop.params)
        self._load = _Load(offer)
        self.is_alone = False
        self._move(State.MOVING)
        return [note, *ends, Opened(offer), ChooseDecode()]

    def decode_broke(self, error: ApiError, *, is_lost: bool = False) -> Actions:
        """Let another node go on with an answer whose node was lost in the middle; end it if none can.

        Args:
            is_lost: As of `prefill_lost`.
        """
        if self._heard.is_over:
            return self._end_of_lost(error)
        if self.sent.beginning is None:
            return self._fail(error)
        if self._is_one_too_many(error, is_lost):
            return self._give_up(Note("decode lost", error))
        # In a rendezvous a node chooses all tokens itself.
        self.may_ask_both = False
        return self._again(Note("answer moved", error))

    def _broke_off(self, why: str, *, is_lost: bool = False) -> Actions:
        when = "in the middle" if self._heard.has_said or self._goes_on else "before its first token"
        return [self._gave_up(why), *self.decode_broke(_lost(why, when), is_lost=is_lost)]

    def _gave_up(self, why: str) -> GaveUp:
        assert self.decode is not None, "it has answered"
        return GaveUp(self.decode, why)

    def _is_one_too_many(self, error: Exception, is_lost: bool) -> bool:
        """Count a loss, and say whether the request may be what ends its nodes."""
        self.lost += [error] if is_lost else []
        # Two nodes that have the last attempt could both be lost.
        self.may_ask_both = self.may_ask_both and len(self.lost) < MAX_LOST - 1
        return len(self.lost) >= MAX_LOST

    def _give_up(self, note: Note) -> Actions:
        """End a request that may be what ends its nodes, before it ends another one."""
        message = f"{len(self.lost)} nodes were lost while they had this request: no other one gets it"
        error = unavailable(f"{message} ({'; '.join(map(str, self.lost))})", retry_after_s=None)
        return [note, *self._fail(self._in_the_middle(error))]

    def _end_of_lost(self, error: ApiError) -> Actions:
        """End an answer whose node was lost after the last token, with the counts that the client
        waits for.
        """
        rest = [] if self.sent.is_complete else [DONE]
        if rest and self._wants_usage and not self._heard.has_usage:
            usage = None if self.sent.beginning is None else self.sent.beginning.usage()
            if usage is None or not self.sent.last:
                return self._fail(error)
            head = {key: each for key, each in events_of(self.sent.last)[0].content.items() if key in _HEAD}
            rest = [Event.of({**head, "choices": [], "usage": usage}), DONE]
        sent = self._sent(rest)
        return [*self._read_errors(self.sent.tail), *sent, *self._end(End())]

    @property
    def _wants_usage(self) -> bool:
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    def decode_ended(self) -> Actions:
        """End a stream whose connection was closed, if all of it has come."""
        if why := self._heard.missing():
            return self._broke_off(why)
        return self._end_of_lost(_lost("the node did not send the counts of tokens", "after its last token"))

    # -- ends ----------------------------------------------------------------------------------------

    def client_left(self) -> Actions:
        """End for a client that waits no longer. It may leave as soon as it has read the end of a stream."""
        if self.state is State.ENDED:
            return []
        actions = [*(self._read_errors(self.sent.tail) if self.sent.is_complete else []), *self._drop()]
        self._move(State.ENDED)
        return actions

    def failed(self, error: ApiError) -> Actions:
        """End for a reason of the router itself, such as its limit on the time of an answer."""
        return [] if self.state is State.ENDED else self._fail(error)

    def _fail(self, error: ApiError) -> Actions:
        self.failure = error
        actions = self._drop()
        self._move(State.ENDED)
        return [*actions, Fail(error)]

    def _end(self, last: Action) -> Actions:
        """End well. The prefill node of a rendezvous may need a moment longer."""
        self._move(State.ENDED)
        return [*self._close(), EndDecode(), last, AwaitPrefill(), EndPrefill()]

    def _again(self, note: Note) -> Actions:
        actions = self._drop()
        self._move(State.QUEUED)
        return [note, *actions, Place()]

    def _drop(self) -> Actions:
        """End both requests, and release the offer if no decode node has answered."""
        return [EndPrefill(), EndDecode(), *self._settle("unanswered"), *self._close()]

    # -- the offer -----------------------------------------------------------------------------------

    def _settle(self, result: Result) -> Actions:
        if self.offer is None or self._load.result is not None:
            return []
        self._load.result = result
        actions: Actions = [Settled(self.offer, self.decode, result)]
        if result in ("failed", "unanswered"):
            return [*actions, *self._release(self.offer)]
        if result == "none":
            # The decode node had the prompt, so nothing needs the rest of the prefill.
            actions.append(EndPrefill())
        return actions

    def _release(self, offer: Offer) -> Actions:
        # End a prefill that still runs before the release, because a producer may treat the release of an
        # unfinished offer as an abort of its request.
        return [EndPrefill(), Release(offer)]

    def _close(self) -> Actions:
        """Report a load that failed; by now its reason is known, if the node has given one."""
        if self.offer is None or self._load.result != "failed" or self.decode is None:
            return []
        return [Explained(self.offer, self.decode, self._load.error)]

    def _read_errors(self, events: Iterable[Event]) -> Actions:
        """Look for the reason of a failure in events; release an offer that was not loaded by what the node
        says there.
        """
        was_known = bool(self._load.error)
        for event in reversed(list(events)):
            self._load.error = self._load.error or error_in(event.content)
        if was_known or not self._load.error or self.offer is None or self._load.result != "unknown":
            return []
        return self._release(self.offer)  # a release of what was loaded does nothing

    def _explained(self) -> ApiError | None:
        """Say why a server of vLLM could not load the prompt, which the server itself only tells its log."""
        if self.offer is None or self.decode is None or not self._load.error or self._load.result == "loaded":
            return None
        difference = self._explain(self.decode, self.offer.node)
        return ApiError(500, f"{self._load.error}: {difference}", kind="server_error") if difference else None

    def _forgive(self) -> None:
        """Let the node that has stopped the answer have it again later, when it is back."""
        node = self.moved_from
        if node is not None and node is not self.decode and self.tried_decode.get(node) is None:
            self.tried_decode.pop(node, None)

    @property
    def _goes_on(self) -> bool:
        """Whether the present node was asked to go on with what the client has."""
        return self.state is State.CONTINUING

    # -- the client ----------------------------------------------------------------------------------

    def _in_the_middle(self, error: ApiError) -> ApiError:
        if self.sent.beginning is None:
            return error
        return ApiError(502, f"the answer was lost in the middle: {error}", kind="server_error")


def _lost(why: str, when: str = "before its first token") -> ApiError:
    return ApiError(502, f"the answer was lost {when}: {why}", kind="server_error")


def _not_continued(begun: Begun) -> str:
    error = object_of(begun.payload).get("error")
    message = error.get("message") if isinstance(error, dict) else ""
    said = message or begun.payload[:200].decode(errors="replace")
    return f"the decode node did not continue the answer: {said}"


def transfer_error(body: Mapping[str, Any]) -> str:
    """Return why a load failed, by the figures of an answer. Empty if they do not say that it did."""
    metrics = body.get("metrics")
    transfer = metrics.get("transfer") if isinstance(metrics, dict) else None
    return str(transfer.get("error") or "") if isinstance(transfer, dict) else ""


def error_in(body: Mapping[str, Any]) -> str:
    """Return why a load or a request failed, from an answer or one event of it. Empty if it does not say."""
    error = body.get("error")
    message = str(error.get("message", "")) if isinstance(error, dict) else ""
    return transfer_error(body) or message
