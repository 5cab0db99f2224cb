"""A request on its way through the router: it does what the exchange wants done, as the router's
`performance` does with sockets.
"""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from kvferry.connector.p2p.params import MOVE, rendezvous_params
from kvferry.router.answer import exchange as does
from kvferry.router.answer.beginnings import beginning_of, followed_body, is_followed
from kvferry.router.answer.bodies import decode_body, prefill_body
from kvferry.router.answer.exchange import Action, Actions, Begun, Exchange, State
from kvferry.router.answer.handoffs import params_of
from kvferry.router.answer.performance import LAST_ANSWER_S, NEXT_LOOK_S
from kvferry.router.choice.fleet import Fleet, Progress
from kvferry.router.choice.placement import Limits
from kvferry.router.choice.ways import Facts, Offer, Options, Way, way_of
from kvferry.router.http.endpoints import COMPLETIONS
from kvferry.router.http.errors import ApiError
from kvferry.router.http.sse import DONE, Event

from ..exchange_simulator import arrived
from .network import Clock, Network, require
from .node import Call, SimulatedNode

_TOKEN = re.compile(rb'"text": "(\d+) "')
#: How long a request waits for a node that can take it, and how often it looks.
_QUEUE_S, _QUEUE_LOOK_S = 60.0, 0.25


class SimulatedRouter:
    """One router, with its fleet of nodes.

    Args:
        find: Returns the present start of a node, by its place.
    """

    def __init__(
        self,
        clock: Clock,
        network: Network,
        chance: random.Random,
        find: Callable[[], Sequence[SimulatedNode]],
        exchange: type[Exchange],
        counts: Counter[str],
        *,
        may_ask_both: bool,
    ) -> None:
        self.clock, self.network, self.chance, self.counts = clock, network, chance, counts
        self.find, self.exchange_class = find, exchange
        self.options = Options(rendezvous=may_ask_both)
        self.fleet = Fleet("auto", Limits(), lambda: clock.now)
        self.clients: dict[str, Client] = {}
        self._number = 0

    def nodes(self, *roles: str) -> list[SimulatedNode]:
        """Return the nodes that are ready and have one of these roles."""
        return [node for node in self.find() if node.is_ready and node.role in roles]

    def draw_name(self) -> str:
        """Draw the name of a rendezvous or of an answer."""
        return f"{self.chance.getrandbits(127) | 1 << 127:032x}"

    def node_leaves(self, node: SimulatedNode) -> None:
        """Move the answers of a node that drains to other ones."""
        for client in list(self.clients.values()):
            client.move_away(node)

    def node_died(self, node: SimulatedNode) -> None:
        self.fleet.forget(node.url)


class Client:
    """A request, from its arrival to the end of its answer.

    Attributes:
        failure: The error with which it ended; None if it did not.
        token_times: When each token came.
    """

    def __init__(
        self,
        router: SimulatedRouter,
        name: str,
        body: Mapping[str, Any],
        expected: Sequence[int],
        on_end: Callable[[Client], None],
    ) -> None:
        self._on_end = on_end
        self.router, self.name, self.expected = router, name, expected
        self.began = router.clock.now
        self.exchange: Any = router.exchange_class(COMPLETIONS, body, {"X-Request-Id": name})
        self.progress = Progress(router.fleet, body)
        self.tokens: list[int] = []
        self.token_times: list[float] = []
        self.ends: list[Action] = []
        self.has_left = False
        self._opened: list[Offer] = []
        self._settled: list[Offer] = []
        self._prefill: tuple[SimulatedNode, Call] | None = None
        self._decode: tuple[SimulatedNode, Call] | None = None
        self._move_as = ""
        self._is_at_once = False  # the prefill node was asked together with the decode node
        self._has_stream = False
        self._epochs: dict[SimulatedNode, int] = {}
        self._chosen = ""
        self._left: deque[Action] | None = None  # what waits for the end of the prefill
        self._later: deque[Callable[[], Actions]] = deque()
        router.clients[name] = self

    @property
    def failure(self) -> ApiError | None:
        return next((end.error for end in self.ends if isinstance(end, does.Fail)), None)

    @property
    def is_over(self) -> bool:
        return bool(self.ends) or self.has_left

    def begin(self) -> None:
        self._follow(self.exchange.begin)

    def leave(self) -> None:
        """Leave as a client does that waits no longer."""
        if not self.is_over:
            self.has_left = True
            self._follow(self.exchange.client_left)
            self._over()

    def _over(self) -> None:
        self.progress.ended()
        if self.router.clients.pop(self.name, None) is not None:
            self._on_end(self)

    # -- actions ---------------------------------------------------------------------------------------

    def _follow(self, event: Callable[[], Actions]) -> None:
        self._later.append(event)
        if self._left is None:
            self._go_on(deque())

    def _go_on(self, left: deque[Action]) -> None:
        while True:
            while left:
                action = left.popleft()
                if isinstance(action, does.AwaitPrefill) and self._prefill is not None:
                    self._left = left
                    self.router.clock.after(LAST_ANSWER_S, self._stop_waiting, left)
                    return
                left.extend(self._do(action))
            if not self._later:
                break
            left.extend(self._later.popleft()())
        if self.ends:
            self._over()

    def _stop_waiting(self, left: deque[Action]) -> None:
        if self._left is left:
            self._left = None
            self._go_on(left)

    def _do(self, action: Action) -> Actions:
        is_asking = isinstance(action, does.Place | does.AskPrefill | does.ChooseDecode | does.AskDecode)
        require(
            not (is_asking and self.exchange.state is State.ENDED),
            "nothing is asked after the end",
            self.name,
        )
        match action:
            case does.Place():
                return self._place(self.router.clock.now + _QUEUE_S)
            case does.AskPrefill():
                return self._ask_prefill(action)
            case does.ChooseDecode():
                return self._choose(self.router.clock.now + _QUEUE_S)
            case does.AskDecode(node, params, after):
                self._ask_decode(node, params, after)  # type: ignore[arg-type]
            case does.EndPrefill():
                if self._prefill is not None:
                    self._prefill[0].num_at_once -= self._is_at_once
                self._hang_up(self._prefill)
                self._prefill = None
            case does.EndDecode():
                self._hang_up(self._decode)
                self._decode = None
                self.progress.answer_ended()
            case does.Opened(offer):
                self._opened.append(offer)
            case does.Settled(offer, _, result):
                is_known = any(offer is each for each in self._opened)
                is_first = not any(offer is each for each in self._settled)
                require(is_known and is_first, "an offer is settled once", self.name)
                self._settled.append(offer)
                self.router.counts[f"handoffs {result}"] += 1
            case does.Release(offer):
                flags = {"do_remote_prefill": False, "do_remote_decode": False, "do_release": True}
                self._tell(offer.node, {**offer.params, **flags})  # type: ignore[arg-type]
            case does.Note(fact):
                self.router.counts[fact] += 1
            case does.Send(events):
                self._send(events)
            case does.End() | does.Fail() | does.SendWhole():
                require(not self.ends, "a client gets one end", self.name)
                self.ends.append(action)
        return []

    def _send(self, events: Sequence[Event]) -> None:
        require(not self.ends, "nothing is sent after the end", self.name)
        for event in events:
            for found in _TOKEN.finditer(event.raw):
                self.tokens.append(int(found[1]))
                self.token_times.append(self.router.clock.now)
                place = len(self.tokens) - 1
                if self.tokens[place] != (self.expected[place] if place < len(self.expected) else None):
                    promise = "each token comes once, in its place"
                    is_double = place > 0 and self.tokens[place] == self.tokens[place - 1]
                    promise += " (a token came twice)" if is_double else ""
                    require(False, promise, (self.name, place, self.tokens, list(self.expected)))

    def _hang_up(self, call: tuple[SimulatedNode, Call] | None) -> None:
        if call is not None:
            node, asked = call
            node.in_flight -= 1
            asked.on_events = lambda events, result, error: None
            asked.on_whole = lambda status, body: None
            asked.on_end = asked.on_lost = lambda: None
            self.router.clock.after(self.router.network.delay(), node.abort, asked)

    def _tell(self, node: SimulatedNode, params: Mapping[str, Any]) -> None:
        body = {"prompt": [0], "max_tokens": 1, "kv_transfer_params": params}
        nothing = Call(body, lambda *told: None, lambda *told: None, lambda: None, lambda: None)
        self.router.clock.after(self.router.network.delay(), node.receive, nothing)

    def _call(self, node: SimulatedNode, call: Call) -> tuple[SimulatedNode, Call]:
        node.in_flight += 1
        self.router.clock.after(self.router.network.latency_s, node.receive, call)
        return node, call

    # -- the choice of nodes ---------------------------------------------------------------------------

    def _decodes(self) -> list[SimulatedNode]:
        exchange = self.exchange
        for node in [node for node, epoch in self._epochs.items() if node.is_dead]:
            # Its next start is another node, which may be asked.
            exchange.tried_decode.pop(node, None)
        nodes = self.router.nodes("kv_consumer", "kv_both")
        beginning = exchange.sent.beginning
        return [
            node
            for node in nodes
            if node not in exchange.tried_decode
            and (beginning is None or beginning.can_continue_at(node.abilities))
        ]

    def _last_resort(self) -> SimulatedNode | None:
        node = self.exchange.moved_from
        if node is None or node.is_dead:
            return None
        return node if self.exchange.tried_decode.get(node) is None else None

    def _place(self, until: float) -> Actions:
        exchange, router = self.exchange, self.router
        prefills, decodes = router.nodes("kv_producer", "kv_both"), self._decodes()
        if not decodes and (last := self._last_resort()) is not None:
            return list(exchange.placed_at(last))
        if not decodes:
            return self._wait(until, self._place, exchange.no_decode_node)
        by_url = {node.url: node for node in (*prefills, *decodes)}
        troubles = [{node.url: 0 for node in nodes} for nodes in (prefills, decodes)]
        # Nodes with one role are chosen by their loads alone, so that a seed keeps its run when estimates
        # change.
        has_both = not troubles[0].keys().isdisjoint(troubles[1])
        choice = router.fleet.choose(self.progress, *troubles) if has_both else None
        self._chosen = ""
        if choice is not None and choice.is_local:
            return list(exchange.placed_at(by_url[choice.decode.url]))
        decode = by_url[choice.decode.url] if choice is not None else min(decodes, key=_load)
        prefill = by_url[choice.prefill.url] if choice is not None else min(prefills, key=_load, default=None)
        if choice is not None and prefill is not None:
            self._chosen = prefill.url
        if prefill is not None and (offer := self._named_offer(prefill, decode)) is not None:
            router.counts["asked both"] += 1
            return list(exchange.placed(offer, decode))
        return list(exchange.placed())

    def _named_offer(self, prefill: SimulatedNode, decode: SimulatedNode) -> Offer | None:
        exchange = self.exchange
        options = self.router.options
        facts = Facts(options, exchange.may_ask_both, prefill, decode)  # type: ignore[arg-type]
        if way_of(facts) is not Way.AT_ONCE or exchange.sent.beginning is not None:
            return None
        params = rendezvous_params(name := self.router.draw_name(), prefill.place)
        return None if params is None else Offer(prefill, params, name)  # type: ignore[arg-type]

    def _choose(self, until: float) -> Actions:
        exchange, nodes = self.exchange, self._decodes()
        others = [node for node in nodes if node.url != self._chosen] or nodes
        if others:
            return list(exchange.decode_chosen(min(others, key=_load)))
        if (last := self._last_resort()) is not None and exchange.state is not State.MOVING:
            return list(exchange.decode_chosen(last))
        return self._wait(until, self._choose, exchange.no_decode_node)

    def _wait(
        self, until: float, again: Callable[[float], Actions], give_up: Callable[[ApiError], Actions]
    ) -> Actions:
        clock, state = self.router.clock, self.exchange.state
        if clock.now >= until:
            return give_up(ApiError(503, "no decode node", kind="x"))

        def look() -> Actions:
            return again(until) if self.exchange.state is state and not self.is_over else []

        clock.after(_QUEUE_LOOK_S, self._follow, look)
        return []

    # -- prefill ---------------------------------------------------------------------------------------

    def _ask_prefill(self, action: does.AskPrefill) -> Actions:
        exchange, router = self.exchange, self.router
        require(self._prefill is None, "one prefill at a time", self.name)
        nodes = [
            node for node in router.nodes("kv_producer", "kv_both") if node not in exchange.tried_prefill
        ]
        chosen = [node for node in nodes if node.url == self._chosen] if not exchange.tried_prefill else []
        node: Any = action.node or min(chosen or nodes, key=_load, default=None)
        if node is None:
            error = ApiError(503, "no prefill node", kind="x")
            return list(exchange.no_prefill_node(error, may_decode_alone=True))
        if action.node is None:
            exchange.tried_prefill[node] = None
        else:
            node.num_at_once += 1
        body = prefill_body(exchange.body, exchange.dialect, wish=action.wish)
        lost = partial(self._prefill_lost, node)
        call = Call(body, lambda *told: None, partial(self._prefill_answered, node), lambda: None, lost)
        self._prefill, self._is_at_once = self._call(node, call), action.node is not None
        self.progress.prompt_asked(node.url)
        return []

    def _prefill_over(self, node: SimulatedNode) -> None:
        node.in_flight -= 1
        node.num_at_once -= self._is_at_once
        self._prefill = None

    def _prefill_lost(self, node: SimulatedNode) -> None:
        self._prefill_over(node)
        error = RuntimeError("lost")
        if node in self.exchange.tried_prefill:
            self.exchange.tried_prefill[node] = error
        self.progress.prompt_ended(is_computed=False)
        self._after_prefill(partial(self.exchange.prefill_lost, error))

    def _prefill_answered(self, node: SimulatedNode, status: int, body: dict[str, Any]) -> None:
        exchange = self.exchange
        self._prefill_over(node)
        if status != 200:
            self._after_prefill(partial(exchange.prefill_refused, ApiError(status, str(body), kind="x")))
            return
        self.progress.prompt_ended(is_computed=True)
        if (params := params_of(body)) is None:
            self._after_prefill(partial(exchange.prefill_answered, None))
            return
        offer = Offer(node, params)  # type: ignore[arg-type]
        self._after_prefill(partial(exchange.prefill_answered, offer))

    def _after_prefill(self, event: Callable[[], Actions]) -> None:
        if (left := self._left) is not None:
            self._left = None
            left.extendleft(reversed(event()))
            self._go_on(left)
        else:
            self._follow(event)

    # -- decode ----------------------------------------------------------------------------------------

    def _ask_decode(self, node: SimulatedNode, params: Mapping[str, Any] | None, after: Any) -> None:
        exchange = self.exchange
        require(self._decode is None, "one decode at a time", self.name)
        exchange.tried_decode[node] = None
        self._epochs[node] = node.epoch
        body = decode_body(exchange.body, params, after)
        self._move_as = self.router.draw_name()
        if is_followed(exchange.body, exchange.path, node.abilities):
            body = followed_body(body, node.abilities, self._move_as)
        if exchange.is_alone:
            self.progress.prompt_asked(node.url)
        self._has_stream = False
        call = Call(
            body,
            partial(self._events, node),
            partial(self._whole, node),
            self._ended,
            partial(self._decode_lost, node),
        )
        self._decode = self._call(node, call)

    def _decode_over(self, node: SimulatedNode) -> None:
        node.in_flight -= 1
        self._decode = None
        self.progress.answer_ended()

    def _events(self, node: SimulatedNode, raw: list[bytes], result: Any, error: str) -> None:
        exchange, events = self.exchange, [Event(each) for each in raw]
        if self._has_stream:
            self.progress.tokens_came(len(events))
            self._follow(partial(arrived, exchange, events))
            return
        self._has_stream = True
        if exchange.is_alone:
            self.progress.prompt_ended(is_computed=True)
        self.progress.answer_began(node.url)
        beginning = beginning_of(exchange.body, exchange.path, node.abilities, events[0])
        begun = Begun(200, {}, True, b"", events, result, error, beginning)
        self._follow(partial(exchange.decode_answered, begun))
        if node.is_draining:
            self.move_away(node)

    def _whole(self, node: SimulatedNode, status: int, body: dict[str, Any]) -> None:
        self._decode_over(node)
        error = ApiError(status, str(body), kind="x")
        if self._has_stream:
            self._follow(partial(self.exchange.decode_broke, error))
        else:
            self._follow(partial(self.exchange.decode_lost, error))

    def _ended(self) -> None:
        if self._decode is not None:
            self._decode_over(self._decode[0])
        self._follow(lambda: [*self.exchange.events_arrived([DONE]), *self.exchange.decode_ended()])

    def _decode_lost(self, node: SimulatedNode) -> None:
        self._decode_over(node)
        self.exchange.tried_decode[node] = RuntimeError("lost")
        if self._has_stream:
            error = ApiError(502, "the answer was lost in the middle", kind="server_error")
            self._follow(partial(self.exchange.decode_broke, error))
        else:
            self._follow(partial(self.exchange.decode_lost, RuntimeError("lost")))

    def move_away(self, node: SimulatedNode) -> None:
        """Have the answer stopped, if its node leaves and another one is there."""
        if self._decode is None or self._decode[0] is not node or self.is_over:
            return
        others = [each for each in self._decodes() if each is not node]
        if self._has_stream and self.exchange.sent.beginning is not None and others:
            self._tell(node, {MOVE: self._move_as})
        elif self._has_stream:
            self.router.clock.after(NEXT_LOOK_S, self.move_away, node)


def _load(node: SimulatedNode) -> int:
    return node.in_flight
