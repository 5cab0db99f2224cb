"""Does what an exchange wants done: asks nodes, writes to the client, and reports what comes of it.

One task follows the exchange, and does one action after the other, so that nothing else writes to the client.
A request to a node is a task of its own, whose result is the event that it ends with.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import aiohttp
from aiohttp import web

from ...connector.p2p.params import CLIENT_REQUEST_ID, REFUSED_TO_CONTINUE, RELEASE_AS, draw_offer_name
from ..choice.fleet import Fleet, Progress
from ..choice.ways import Facts, Offer, Options, named_offer
from ..http.direct import Stream
from ..http.errors import ApiError, note_answered
from ..http.json_body import dumps, object_of
from ..http.sse import Event, events_of
from ..http.tracing import traced_params
from ..nodes.calls import NodeCalls
from ..nodes.membership import Role
from ..nodes.pool import NodeGoneError, NodePool, NoNodeError, Tried, UpstreamNode
from ..nodes.reading import NodeAnswer
from ..nodes.states import Abilities, NodeState
from . import exchange as does
from .beginnings import FOLLOWED_PATHS, beginning_of, followed_body, is_followed
from .bodies import decode_body, must_compute_alone, prefill_body
from .dialects import error_events
from .endings import choices_of, objection_to, says_engine_ended
from .exchange import Action, Actions, Bookkeeping, Exchange
from .handoffs import Handoffs, begun_of, params_of
from .moves import signal_in
from .sessions import NO_TURN, Sessions, Turn

if TYPE_CHECKING:
    from ..seen.records import Observer

logger = logging.getLogger(__name__)

#: Where the prompt was computed, and the estimates behind that.
PLACEMENT_HEADER = "X-KV-Placement"
#: The field of an answer, or of an event before its end, with a receipt for each prompt.
RECEIPTS = "kv_receipts"
#: Tells how the cache of an answer came, as `seen/receipts.py` writes it.
Receipt = Callable[[], Awaitable[Mapping[str, Any]]]
DecodeAlone = Literal["auto", "always", "never"]
#: How long to try to send the error that ends a stream to a client that does not read.
ERROR_SEND_S = 1.0
#: Answers that move at a time. Each of them pauses while the next node loads it, and the others go on where
#: they are meanwhile.
MAX_MOVES = 4
#: How long a move keeps its turn, in case the node never stops the answer.
MOVE_S = 5.0
#: How long an answer stays at a node that drains before it looks for another node again.
NEXT_LOOK_S = 0.5
#: After the decode node's answer has ended, wait this long for the end of the prefill node's.
LAST_ANSWER_S = 0.5


@dataclass
class Services:
    """What all requests share.

    Attributes:
        answer_timeout_s: An answer that takes longer ends with an error. 0 sets no limit.
        decode_alone: Whether a decode node receives a request that no prefill node can take. `auto` means: if
            it reports the policy `recompute`.
        fleet: What the nodes have to do.
        moves: The turns of answers that move to another node.
        session: For requests to nodes, other than those that begin an answer.
        calls: For those.
    """

    prefill_pool: NodePool
    decode_pool: NodePool
    handoffs: Handoffs
    options: Options
    answer_timeout_s: float
    decode_alone: DecodeAlone
    fleet: Fleet
    sessions: Sessions = field(default_factory=Sessions)
    moves: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_MOVES))
    session: aiohttp.ClientSession = field(init=False)
    calls: NodeCalls = field(init=False)

    def can_decode_alone(self, tried: Tried, body: Mapping[str, Any]) -> bool:
        """Whether a ready decode node that was not tried yet would compute a whole prompt itself."""
        fitting = (node for node in self.decode_pool.nodes if node.serves(body.get("model")))
        nodes = (node for node in fitting if node not in tried)
        return any(node.state is NodeState.READY and self.computes_alone(node) for node in nodes)

    def computes_alone(self, node: UpstreamNode) -> bool:
        """Whether a decode node may receive a prompt that no prefill node has computed."""
        match self.decode_alone:
            case "always":
                return True
            case "never":
                return False
            case "auto":
                return node.said.load_failure_policy == "recompute"


class UpstreamAnswer(ApiError):
    """A node's refusal, which is passed on to the client unchanged."""

    def __init__(self, status: int, payload: bytes) -> None:
        error = object_of(payload).get("error")
        message = str(error["message"]) if isinstance(error, dict) and "message" in error else ""
        super().__init__(status, message or payload[:200].decode(errors="replace"), kind="upstream")
        self.payload = payload

    def response(self, path: str = "") -> web.Response:
        return web.Response(body=self.payload, status=self.status, content_type="application/json")


def explained_difference(decode: UpstreamNode, prefill: UpstreamNode) -> str:
    """Say why no cache can be handed over, after a load that failed."""
    decode.doubt_identity()  # it may have changed since it was asked
    return decode.difference_to(prefill)


class Performance:
    """Follows one exchange from its beginning to its end.

    Args:
        observer: Is told what happens.
        turn: Of the conversation that the request continues.
        receipt: Tells how the cache of the answer came. None: the client gets no receipt.
    """

    def __init__(
        self,
        services: Services,
        exchange: Exchange,
        request: web.Request,
        observer: Observer,
        turn: Turn = NO_TURN,
        receipt: Receipt | None = None,
    ) -> None:
        self._services = services
        self._exchange = exchange
        self._request = request
        self._observer = observer
        self._receipt = receipt  # None after it was written
        self._turn, self._prefill_url = turn, turn.prefill_url  # of the node that has most of the prompt
        self._progress = Progress(services.fleet, exchange.body)
        self._chosen: UpstreamNode | None = None  # to compute the prompt
        self._asked_at: dict[UpstreamNode, int] = {}  # decode nodes, with their `num_ends` then
        self._has_come = False  # the beginning of a stream, from the decode node that was asked last
        self._calls: dict[str, asyncio.Task[Callable[[], Actions]]] = {}
        self._closing: list[asyncio.Task[Any]] = []
        self._answer: NodeAnswer | None = None  # a stream that is being read
        self._mover: asyncio.Task[None] | None = None  # of this stream, or of the one before, which moves
        self._call: ExitStack | None = None  # the request to the decode node that has answered
        self._open: list[Offer] = []  # offers that were opened, and not settled yet
        self._stream: Stream | None = None
        self._last_sent = b""  # whole events
        self._reply: web.Response | ApiError | None = None  # in place of a stream

    async def run(self) -> web.StreamResponse:
        """Answer the request.

        Raises:
            ApiError: What the client is to get instead of an answer.
        """
        limit_s, exchange = self._services.answer_timeout_s, self._exchange
        try:
            async with asyncio.timeout(limit_s or None) as limit:
                await self._follow(exchange.begin())
        except (ApiError, ConnectionError):
            raise  # it ends the answer to several prompts, or the client has left
        except Exception as error:
            is_late = isinstance(error, TimeoutError) and limit.expired()
            if not is_late:
                logger.exception("%s: answering failed", exchange.request_id)
            self._take_results()
            if not (actions := exchange.failed(too_late(limit_s) if is_late else _bug(error))):
                raise
            await self._do_all(actions)
        finally:
            try:
                self._take_results()
                self._note_all(exchange.client_left())
            finally:
                self._close()
            # Last, because a client that has the last byte may leave, which cancels what still waits here.
            # What is waited for ends all the same: it was cancelled before, and a second time could break off
            # how it ends.
            await asyncio.shield(asyncio.gather(*self._closing, return_exceptions=True))
        if isinstance(self._reply, ApiError):
            raise self._reply
        response = self._stream if self._reply is None else self._reply
        assert response is not None, "an exchange ends with an answer or an error"
        self._observer.ended(response.status, exchange.failure)
        return response

    def _take_results(self) -> None:
        """Take in what has come of requests to nodes, and was not looked at: it may be an offer."""
        for role in [role for role, call in self._calls.items() if _has_result(call)]:
            self._note_all(self._calls.pop(role).result()())

    def _close(self) -> None:
        """End everything, without waiting: a task that is cancelled before its first step never runs."""
        # Of an exchange that has failed before it could say what becomes of them.
        for offer in tuple(self._open):
            self._note_all([does.Settled(offer, self._exchange.decode, "unanswered"), does.Release(offer)])
        self._end("prefill")
        self._end("decode")
        self._end_mover()
        self._progress.ended()
        self._observer.left_out(self._exchange.bill.num_left_out)
        whole = self._reply if isinstance(self._reply, web.Response) else None
        if self._exchange.sent.is_complete or whole is not None:
            self._observer.ended(200 if whole is None else whole.status)
        self._observer.closed()

    async def _follow(self, actions: Actions) -> None:
        await self._do_all(actions)
        while self._calls or self._answer is not None:
            if self._answer is not None:
                await self._do_all(await self._read(self._answer))
                continue
            await asyncio.wait(self._calls.values(), return_when=asyncio.FIRST_COMPLETED)
            for role in ("prefill", "decode"):
                if (call := self._calls.get(role)) is not None and call.done():
                    del self._calls[role]
                    await self._do_all(call.result()())

    # -- actions -------------------------------------------------------------------------------------

    async def _do_all(self, actions: Actions) -> None:
        left = deque(actions)
        try:
            while left:
                action = left.popleft()
                if isinstance(action, Bookkeeping):
                    self._note(action)
                else:
                    left.extend(await self._do(action))
        finally:
            self._note_all(left)  # the client has left in the middle

    def _note_all(self, actions: Sequence[Action] | deque[Action]) -> None:
        for action in actions:
            if isinstance(action, Bookkeeping):
                self._note(action)

    def _note(self, action: Bookkeeping) -> None:
        services, exchange = self._services, self._exchange
        match action:
            case does.GaveUp(node, reason):
                self._gave_up(node, reason)
            case does.Opened(offer):
                self._open.append(offer)
                services.handoffs.opened(offer)
            case does.Settled(offer, decode, result):
                self._open.remove(offer)
                services.handoffs.settled(offer, decode, result)
            case does.Explained(offer, decode, error):
                services.handoffs.explained(offer, decode, error)
                self._observer.handoff_failed(error)
            case does.Release(offer):
                services.handoffs.release(services.session, exchange, offer)
            case does.EndPrefill():
                self._end("prefill")
            case does.EndDecode():
                self._end("decode")
            case does.Note(fact, why):
                self._observer.happened(fact, why)

    async def _do(self, action: Action) -> Actions:
        match action:
            case does.Place():
                return await self._place()
            case does.AskPrefill(node=None):
                # Nothing else can happen meanwhile, so this needs no task of its own.
                return (await self._prefill(action))()
            case does.AskPrefill():
                self._calls["prefill"] = call = asyncio.create_task(self._prefill(action))
                assert action.node is not None, "the case above"
                action.node.num_at_once += 1
                call.add_done_callback(partial(_count_end, action.node))
                await asyncio.sleep(0)  # it sends its request first
            case does.ChooseDecode():
                return await self._choose_decode()
            case does.AskDecode() if not self._calls:
                return (await self._decode(action))()
            case does.AskDecode():
                self._calls["decode"] = asyncio.create_task(self._decode(action))
            case does.AwaitPrefill():
                return await self._await_prefill()
            case does.Begin(status, headers):
                await self._begin(status, {**headers, **self._placement()})
            case does.Send(events):
                await self._send(events)
            case does.SendWhole(status, headers, payload, content):
                if status == 200:
                    bill = self._exchange.bill
                    await self._await_counts(is_needed=bill.is_waiting and b'"usage"' in payload)
                    payload = await self._with_receipt(bill.whole(payload, content))
                self._reply = web.Response(
                    body=payload, status=status, headers={**headers, **self._placement()}
                )
            case does.End():
                await self._finish()
            case does.Fail(error):
                await self._fail(error)
        return []

    def _end(self, role: str) -> None:
        """End a request to a node, without waiting for that."""
        if (call := self._calls.pop(role, None)) is not None:
            call.cancel()
            self._closing.append(call)
        if role == "decode":
            self._progress.answer_ended()
        if role == "decode" and (answered := self._call) is not None:
            self._answer = self._call = None
            if self._exchange.sent.is_complete:
                self._observer.decode_reported(self._exchange.sent.tail)
            answered.close()

    def _gave_up(self, node: UpstreamNode, reason: str) -> None:
        tried = self._exchange.tried_decode
        if tried.get(node) is None:
            node.suspect()  # it may be stopping, which is no fault of it
            tried[node] = NodeGoneError(node, reason, may_eject=False)

    # -- nodes ---------------------------------------------------------------------------------------

    def _facts(self, prefill: UpstreamNode | None, decode: UpstreamNode | None = None) -> Facts:
        exchange = self._exchange
        return Facts(self._services.options, exchange.may_ask_both, prefill, decode)

    def _choose(
        self,
        prefills: Sequence[UpstreamNode],
        decodes: Sequence[UpstreamNode],
        *,
        may_be_local: bool = True,
        may_hand_over: bool = True,
    ) -> tuple[UpstreamNode, UpstreamNode] | None:
        """Choose the node for the prompt and the one for the answer; None if there is none for one of
        them.
        """
        # Of nodes that are alike, the first is taken: a conversation stays where it is.
        prefills = sorted(prefills, key=lambda node: node.url != self._prefill_url)
        firsts, seconds = ({node.url: node for node in nodes} for nodes in (prefills, decodes))
        troubles = [{node.url: node.trouble for node in nodes} for nodes in (prefills, decodes)]
        choice = self._services.fleet.choose(
            self._progress, *troubles, may_be_local=may_be_local, may_hand_over=may_hand_over
        )
        return None if choice is None else (firsts[choice.prefill.url], seconds[choice.decode.url])

    async def _place(self) -> Actions:
        exchange, services = self._exchange, self._services
        self._forget_ended()
        self._chosen = None
        decodes = self._decodes()
        if not decodes:
            # Before the prefill: without a decode node its offer would only hold blocks until the lease ends.
            return await self._without_decode()
        if must_compute_alone(exchange.body, exchange.dialect) and (
            pair := self._choose(decodes, decodes, may_hand_over=False)
        ):
            return exchange.placed_at(pair[1])
        if (pair := self._choose(services.prefill_pool.usable({}, exchange.body), decodes)) is None:
            return exchange.placed()
        self._chosen, decode = pair
        self._say_placed()
        if self._chosen.url == decode.url:
            self._note_computed(decode.url)
            return exchange.placed_at(decode)
        if (offer := named_offer(self._facts(*pair))) is None:
            return exchange.placed()
        self._observer.asks_both()
        return exchange.placed(offer, decode)

    def _say_placed(self) -> None:
        choice = self._progress.choice
        assert choice is not None, "it was just made"
        self._observer.placed(choice)

    def _decodes(self) -> list[UpstreamNode]:
        """Return the nodes that can answer now."""
        exchange = self._exchange
        return self._services.decode_pool.usable(exchange.tried_decode, exchange.body, self._may_decode)

    async def _without_decode(self) -> Actions:
        exchange, pool = self._exchange, self._services.decode_pool
        if (last := self._last_resort()) is None or exchange.state is does.State.MOVING:
            return exchange.no_decode_node(await pool.no_node(exchange.tried_decode, exchange.body))
        is_new = exchange.state is does.State.QUEUED
        return exchange.placed_at(last) if is_new else exchange.decode_chosen(last)

    def _note_computed(self, url: str) -> None:
        """Note which node has the prompt, for another attempt and for the conversation's next turn."""
        self._prefill_url = url
        self._services.sessions.remember(self._turn, url)

    def _forget_ended(self) -> None:
        """Let nodes whose process has ended since they were asked be asked again: an answer may outlive more
        losses than there are nodes.

        Only if the answer has gone on since. Otherwise a request that ends each node would also end those
        that come back.
        """
        if self._has_come:
            self._has_come = False
            for node in [node for node, ends in self._asked_at.items() if node.num_ends != ends]:
                self._exchange.tried_decode.pop(node, None)

    async def _choose_decode(self) -> Actions:
        exchange, services = self._exchange, self._services
        decodes = self._decodes()
        if exchange.is_alone:
            decodes = [node for node in decodes if services.computes_alone(node)]
        if exchange.offer is None:
            pair = self._choose(decodes, decodes, may_hand_over=False)
        else:
            pair = self._choose([exchange.offer.node], decodes, may_be_local=False)
        return await self._without_decode() if pair is None else exchange.decode_chosen(pair[1])

    def _may_decode(self, node: UpstreamNode) -> bool:
        beginning = self._exchange.sent.beginning
        return beginning is None or beginning.can_continue_at(node.abilities)

    def _last_resort(self) -> UpstreamNode | None:
        """Return the node that has stopped the answer, if it is still there: it drains, but it has
        the cache.
        """
        node = self._exchange.moved_from
        if node is None or node.state is NodeState.GONE or not self._may_decode(node):
            return None
        return node if self._exchange.tried_decode.get(node) is None else None

    def _next_prefill(self, tried: Tried) -> UpstreamNode | None:
        """Return the node that was chosen with the decode node, or another one if it has failed."""
        prefills = self._services.prefill_pool.usable(tried, self._exchange.body)
        if self._chosen in prefills:
            return self._chosen
        pair = self._choose(prefills, self._decodes(), may_be_local=False)
        return next(iter(prefills), None) if pair is None else pair[0]

    async def _prefill(self, action: does.AskPrefill) -> Callable[[], Actions]:
        """Ask a prefill node. Returns what comes of it."""
        exchange, services = self._exchange, self._services
        tried = exchange.tried_prefill if action.node is None else {}
        try:
            if (node := self._next_prefill(tried)) is None:
                raise await services.prefill_pool.no_node(tried, exchange.body)
            with services.prefill_pool.using(node, tried):
                name = draw_offer_name()
                body = prefill_body(
                    exchange.body,
                    exchange.dialect,
                    wish=action.wish or {RELEASE_AS: name},
                )
                self._progress.prompt_asked(node.url)
                with ExitStack() as stack:
                    try:
                        answer = await self._ask(stack, "prefill", node, body)
                    except (asyncio.CancelledError, NodeGoneError):
                        if not action.wish:  # otherwise the exchange knows the offer's name, and releases it
                            # Its answer may be on its way, and nothing reads it any more.
                            services.handoffs.release(
                                services.session, exchange, Offer(node, {RELEASE_AS: name})
                            )
                        raise
                    if answer.status != 200:
                        _raise_refusal(node, answer)
                    if objection := objection_to(answer.payload, answer.content):
                        raise NodeGoneError(node, objection, may_eject=False)
                    result = answer.content
                    exchange.bill.prefilled(result)
                    self._observer.prefill_answered(result)
                    self._progress.prompt_ended(is_computed=True)
                params = params_of(result)
                if params is None and action.node is not None:
                    raise NodeGoneError(node, "offered no KV cache", may_eject=False)
                node.note_answered()
        except NoNodeError as error:
            alone = services.can_decode_alone(exchange.tried_decode, exchange.body)
            return partial(exchange.no_prefill_node, error, may_decode_alone=alone)
        except NodeGoneError as error:
            return partial(exchange.prefill_lost, error, is_lost=error.is_lost)
        except ApiError as error:
            return partial(exchange.prefill_refused, error)
        node.note_params(params)
        self._note_computed(node.url)
        if params is None:
            logger.debug("%s: %s offered no KV cache", exchange.request_id, node.url)
            return partial(exchange.prefill_answered, None)
        return partial(exchange.prefill_answered, Offer(node, params))

    async def _await_prefill(self) -> Actions:
        if (call := self._calls.get("prefill")) is None:
            return []
        await asyncio.wait({call}, timeout=LAST_ANSWER_S)
        if not call.done():
            return []
        del self._calls["prefill"]
        return call.result()()

    async def _decode(self, action: does.AskDecode) -> Callable[[], Actions]:
        """Ask a decode node. Returns what comes of it."""
        exchange, node = self._exchange, action.node
        self._asked_at[node] = node.num_ends
        body = decode_body(exchange.body, action.params, action.after)
        # As they are now, because they are part of the request.
        abilities = node.abilities if self._services.options.continue_answers else Abilities()
        move_as = draw_offer_name()
        if is_followed(exchange.body, exchange.path, abilities):
            body = followed_body(body, abilities, move_as)
        if exchange.is_alone:
            self._progress.prompt_asked(node.url)
        if not exchange.is_stream:
            self._progress.answer_began(node.url)
        try:
            with ExitStack() as stack:
                stack.enter_context(self._services.decode_pool.using(node, exchange.tried_decode))
                path = None if action.after is None else action.after.path
                answer = await self._ask(stack, "decode", node, body, path)
                if _is_for_another(answer):
                    raise _failed(node, answer)
                _require_continued(node, answer)
                self._call = stack.pop_all()
        except NodeGoneError as error:
            self._progress.answer_ended()
            return partial(exchange.decode_lost, error, is_lost=error.is_lost)
        return partial(self._answered, node, answer, abilities, move_as)

    def _answered(
        self, node: UpstreamNode, answer: NodeAnswer, abilities: Abilities, move_as: str
    ) -> Actions:
        self._end_mover()
        self._observer.decode_began(answer)
        if self._exchange.is_alone:
            # The time of a whole answer says little about its prompt.
            self._progress.prompt_ended(is_computed=answer.is_stream)
        if answer.is_stream:
            self._progress.answer_began(node.url)
            self._answer, self._has_come = answer, True
        exchange = self._exchange
        first = next((event for event in answer.events if not event.is_comment), None)
        begun = begun_of(
            answer,
            beginning=None if first is None else beginning_of(exchange.body, exchange.path, abilities, first),
            adds_loads=node.abilities.vllm_max_model_len > 0,
            computes_again=node.said.load_failure_policy != "fail",
        )
        actions = exchange.decode_answered(begun)
        if not answer.is_stream and exchange.state is does.State.ENDED:
            node.note_answered()
        if answer.is_stream and exchange.sent.beginning is not None:
            self._mover = asyncio.create_task(self._move_away(node, answer, move_as))
        return actions

    async def _move_away(self, node: UpstreamNode, answer: NodeAnswer, move_as: str) -> None:
        """Have a stream stopped, for another node to go on with, as soon as its node drains.

        Without another node it stays.
        """
        services, exchange = self._services, self._exchange
        while True:
            await node.leaves.wait()
            async with services.moves:
                if self._answer is not answer:
                    return  # it has ended, or was lost
                # Not to a node that may refuse it.
                if any(other.state is NodeState.READY for other in self._decodes()):
                    await services.handoffs.stop(services.session, exchange, node, move_as)
                    await asyncio.sleep(MOVE_S)  # until the next node answers, which ends this task
                    return
            await asyncio.sleep(NEXT_LOOK_S)

    def _end_mover(self) -> None:
        if self._mover is not None:
            self._mover.cancel()
            self._closing.append(self._mover)
            self._mover = None

    async def _read(self, answer: NodeAnswer) -> Actions:
        """Wait for the next events of the decode node's stream."""
        exchange, node = self._exchange, self._exchange.decode
        assert node is not None, "it has answered"
        try:
            async with node.exchange():
                events = await answer.more(self._pass_on)
        except NodeGoneError as error:
            exchange.tried_decode[node] = error
            # A health check takes time, in which another node could go on with the answer.
            why = str(error) if exchange.sent.beginning is not None else await error.explained()
            lost = f"the answer was lost in the middle: {why}"
            return exchange.decode_broke(ApiError(502, lost, kind="server_error"), is_lost=error.is_lost)
        if events is not None:
            self._progress.tokens_came(len(events))
            return exchange.events_arrived(events)
        actions = exchange.decode_ended()
        if exchange.failure is None and exchange.state is does.State.ENDED:
            node.note_answered()
        return actions

    def _pass_on(self, chunk: bytes) -> bool:
        """Write bytes of a stream that only carry more of the answer, at once. Called for every token.

        A client that does not read makes this stop, and then the node has to wait as well.
        """
        stream = self._stream
        # Asked last, because for the exchange the client has what `passed` returns.
        if stream is None or not stream.may_write_now or (passed := self._exchange.passed(chunk)) is None:
            return False
        own, num = passed
        stream.write_now(own)
        self._last_sent = own
        self._observer.sends(num)
        self._progress.tokens_came(num)
        return True

    async def _ask(
        self,
        stack: ExitStack,
        role: Role,
        node: UpstreamNode,
        body: Mapping[str, Any],
        path: str | None = None,
    ) -> NodeAnswer:
        """Send a request to a node, and return its answer, whole or with its first event.

        Closing the stack aborts the request.

        Raises:
            NodeGoneError: The connection broke before that, or health checks found the node gone.
        """
        span = stack.enter_context(self._observer.asks(role, node.url))
        if isinstance(params := body.get("kv_transfer_params"), Mapping):
            # A node inside vLLM reads the headers only if vLLM traces, so the context is here as well.
            if self._exchange.path not in FOLLOWED_PATHS:  # there vLLM's ids have the header in them
                params = {**params, CLIENT_REQUEST_ID: self._exchange.request_id}
            body = {**body, "kv_transfer_params": traced_params(params, span)}
        headers = {**self._exchange.headers, **span.headers}
        async with node.exchange():
            calls = self._services.calls
            response = await calls.post(node.url, path or self._exchange.path, dumps(body), headers)
            stack.callback(response.close)
            answer = NodeAnswer(response)
            await answer.begin()
        return answer

    # -- the client ----------------------------------------------------------------------------------

    def _placement(self) -> Mapping[str, str]:
        """Return the header that tells the client which nodes were chosen, and why."""
        choice = self._progress.choice
        return {} if choice is None else {PLACEMENT_HEADER: str(choice)}

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        stream = Stream(status=status, headers=headers)
        await stream.prepare(self._request)
        self._stream = stream

    async def _send(self, events: Sequence[Event]) -> None:
        self._observer.sends(len(events))
        bill = self._exchange.bill
        await self._await_counts(is_needed=any(map(bill.awaits_prefill, events)))
        events = [bill.event(event) for event in events]
        if self._exchange.sent.is_complete:
            events[-1:-1] = await self._receipt_event()  # clients read no further than the last event
        await self._write(events)

    async def _receipts(self) -> dict[str, Any]:
        """Return the field of the answer with its receipt, once; empty if the client gets none."""
        if (receipt := self._receipt) is None:
            return {}
        self._receipt = None
        # Before the figures are read: the actions that end the request report the tail only later.
        self._observer.decode_reported(self._exchange.sent.tail)
        return {RECEIPTS: [await receipt()]}

    async def _with_receipt(self, payload: bytes) -> bytes:
        receipts = await self._receipts()
        return json.dumps({**object_of(payload), **receipts}).encode() if receipts else payload

    async def _receipt_event(self) -> list[Event]:
        receipts = await self._receipts()
        if not receipts:
            return []
        event = Event.of(receipts_event(receipts[RECEIPTS]))
        named = self._exchange.dialect.last_events
        return [Event(b"event: " + RECEIPTS.encode() + b"\n" + event.raw) if named else event]

    async def _await_counts(self, *, is_needed: bool) -> None:
        """Wait a moment for the prefill node's count of tokens, which is a part of the decode node's."""
        if is_needed and (call := self._calls.get("prefill")) is not None:
            await asyncio.wait({call}, timeout=LAST_ANSWER_S)

    async def _write(self, events: Sequence[Event]) -> None:
        assert self._stream is not None, "begun before"
        await self._stream.write(b"".join(event.raw for event in events))
        self._last_sent = events[-1].raw
        if self._exchange.sent.is_complete:
            note_answered(self._request, self._stream.status)

    async def _finish(self) -> None:
        assert self._stream is not None, "begun before"
        await self._stream.write_eof()

    async def _fail(self, error: ApiError) -> None:
        self._observer.fails(error)
        if self._stream is None:
            self._reply = error
        else:
            await send_error(self._request, self._stream, error, self._last_sent)


def receipts_event(receipts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the event of a stream with its receipts.

    It has no choices, as the event with the usage, which every client of streams knows.
    """
    return {"object": RECEIPTS, "type": RECEIPTS, "choices": [], RECEIPTS: receipts}


def too_late(limit_s: float) -> ApiError:
    """Return the error of an answer that took longer than it may."""
    message = (
        f"the answer was not complete within {limit_s:g} s, the limit of the router's --answer-timeout-s"
    )
    return ApiError(504, message, kind="timeout_error", code="timeout")


def _bug(error: Exception) -> ApiError:
    return ApiError(500, f"{type(error).__name__}: {error}", kind="server_error")


async def send_error(
    request: web.Request, stream: web.StreamResponse, error: ApiError, last: bytes = b""
) -> None:
    """End a stream with an error.

    Args:
        last: The last events that the client has.
    """
    had = events_of(last)[-1:]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ERROR_SEND_S):
            await stream.write(b"".join(event.raw for event in error_events(request.path, error, *had)))
            note_answered(request, stream.status)
            await stream.write_eof()


def _count_end(node: UpstreamNode, call: object) -> None:
    node.num_at_once -= 1


def _has_result(call: asyncio.Task[Any]) -> bool:
    return call.done() and not call.cancelled() and call.exception() is None


def _raise_refusal(node: UpstreamNode, answer: NodeAnswer) -> NoReturn:
    if 400 <= answer.status < 500 and answer.status != 429:
        raise UpstreamAnswer(answer.status, answer.payload)
    raise _failed(node, answer)


def _is_for_another(answer: NodeAnswer) -> bool:
    """Whether another decode node may give the answer that this one did not begin."""
    return answer.status in (429, 502, 503) or _has_ended(answer)


def _has_ended(answer: NodeAnswer) -> bool:
    return answer.status == 500 and any(map(says_engine_ended, answer.contents()))


def _failed(node: UpstreamNode, answer: NodeAnswer) -> NodeGoneError:
    if answer.status in (502, 503) or _has_ended(answer):
        node.suspect()  # it may be draining, or its engine may be dead; a health check will tell
    # A node that answers 429 is well, and has more requests than it may have. Another one may have fewer.
    reason = f"answered {answer.status}: {answer.payload[:200].decode(errors='replace')}"
    return NodeGoneError(node, reason, may_eject=answer.status not in (429, 503), is_lost=_has_ended(answer))


def _require_continued(node: UpstreamNode, answer: NodeAnswer) -> None:
    """Check that a server of vLLM has not refused to continue an answer.

    Raises:
        NodeGoneError: It has, because it is another model than the router knew. Another node may continue.
    """
    if REFUSED_TO_CONTINUE.encode() not in answer.payload:
        return
    for choice in (one for content in answer.contents() for one in choices_of(content)):
        if (why := signal_in(choice, REFUSED_TO_CONTINUE)) is not None:
            node.doubt_identity()
            raise NodeGoneError(node, REFUSED_TO_CONTINUE + why, may_eject=False)
