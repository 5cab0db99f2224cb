"""Bugs planted in the router's exchange, which the random schedules, the explorer of every state and the
simulator of the whole stack find.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from kvferry.router.answer import exchange as does
from kvferry.router.answer.exchange import Actions, Exchange
from kvferry.router.choice.ways import Offer
from kvferry.router.http.errors import ApiError
from kvferry.router.http.sse import Event

from .exchange_simulator import Told


class ForgetsTheRelease(Exchange):
    def _release(self, offer: Offer) -> Actions:
        return []


class ReleasesWhatWasLoaded(Exchange):
    def _settle(self, result: Any) -> Actions:
        actions = super()._settle(result)
        return [*actions, *(self._release(self.offer) if actions and self.offer is not None else [])]


class RetriesAfterBytesWereSent(Exchange):
    def decode_broke(self, error: ApiError, **known: Any) -> Actions:
        self.sent.followed = None
        return self._again(does.Note("decode lost", error))


class GivesAnswersUp(Exchange):
    def decode_broke(self, error: ApiError, **known: Any) -> Actions:
        return self._fail(error)


class MovesWithTheFirstEventOnly(Exchange):
    """The tokens that follow the first event are not counted."""

    def events_arrived(self, events: Iterable[Event]) -> Actions:
        before, self.sent.followed = self.sent.beginning, None
        actions = super().events_arrived(events)
        self.sent.followed = before
        return actions


class ForgetsWhatItPassedOn(Exchange):
    """Bytes that are passed on unread are not kept for another node."""

    def passed(self, chunk: bytes) -> tuple[bytes, int] | None:
        self.sent.follow = lambda chunk: None  # type: ignore[method-assign]
        passed = super().passed(chunk)
        del self.sent.follow
        return passed


class PassesAnEndOn(Exchange):
    """Bytes are passed on whatever they say."""

    def passed(self, chunk: bytes) -> tuple[bytes, int] | None:
        self._plain.count = lambda chunk: chunk.count(b"\n\n")  # type: ignore[method-assign]
        return super().passed(chunk)


class MovesAnswersThatAreOver(Exchange):
    def decode_broke(self, error: ApiError, *, is_lost: bool = False) -> Actions:
        self._heard.is_over = False
        return super().decode_broke(error, is_lost=is_lost)


class BelievesAClosedConnection(Exchange):
    """A stream that ends is taken for a complete one."""

    def decode_ended(self) -> Actions:
        return [*self._read_errors(self.sent.tail), *self._end(does.End())]


class BelievesThatAnAnswerIsWhole(Exchange):
    def decode_answered(self, begun: Any) -> Actions:
        return super().decode_answered(replace(begun, objection=""))


class RemembersTheNodeBefore(Exchange):
    """What the lost node has said is taken for what the next one says."""

    def _ask_decode(self, *args: Any) -> Any:
        heard = self._heard
        asked = super()._ask_decode(*args)
        self._heard.has_said = heard.has_said
        return asked


class LeavesTheCountsOut(Exchange):
    _wants_usage = False


class MovesToTheLostNode(Exchange):
    def _again(self, note: does.Note) -> Actions:
        if note.fact == "answer moved":
            self.tried_decode = {}
        return super()._again(note)


class LeavesTheLostStreamOpen(Exchange):
    def decode_broke(self, error: ApiError, **known: Any) -> Actions:
        actions = super().decode_broke(error, **known)
        return [action for action in actions if not isinstance(action, does.EndDecode)]


class GoesOnAfterOtherTokens(Exchange):
    """A node that chose other tokens is believed."""

    def _fail(self, error: ApiError) -> Actions:
        return self._end(does.End()) if "other tokens" in str(error) else super()._fail(error)


class BeginsTheSecondHalfAnew(Exchange):
    """The next node is not told after which tokens to continue."""

    def _ask_decode(self, node: Any, params: Any, after: Any) -> Any:
        return super()._ask_decode(node, params, None)


class EndsTwice(Exchange):
    def decode_ended(self) -> Actions:
        return [*super().decode_ended(), does.End()]


class AsksAfterTheEnd(Exchange):
    def _fail(self, error: ApiError) -> Actions:
        return [*super()._fail(error), does.Place()]


class SettlesTwice(Exchange):
    def _settle(self, result: Any) -> Actions:
        self._load.result = None
        return super()._settle(result)


class NeverSettlesForAClientThatLeft(Exchange):
    def client_left(self) -> Actions:
        actions = super().client_left()
        return [action for action in actions if not isinstance(action, does.Settled | does.Release)]


class BlamesTheDecodeNodeForAPrefill(Exchange):
    def prefill_lost(self, error: Exception, **known: Any) -> Actions:
        tried = self.tried_decode
        actions = super().prefill_lost(error, **known)
        self.tried_decode = tried
        return actions


class TriesBothAtOnceForever(Exchange):
    def prefill_lost(self, error: Exception, **known: Any) -> Actions:
        actions = super().prefill_lost(error, **known)
        self.may_ask_both = True
        return actions


class LeavesThePrefillRunning(Exchange):
    def _drop(self) -> Actions:
        return [action for action in super()._drop() if not isinstance(action, does.EndPrefill)]


class LeavesTheDecodeRunning(Exchange):
    def _drop(self) -> Actions:
        return [action for action in super()._drop() if not isinstance(action, does.EndDecode)]


class DropsAnEvent(Exchange):
    def events_arrived(self, events: Iterable[Event]) -> Actions:
        events = list(events)
        return super().events_arrived(events[1:] if len(events) > 2 else events)


class GivesUpAtTheFirstLoss(Exchange):
    def decode_lost(self, error: Exception, **known: Any) -> Actions:
        return self._fail(ApiError(503, "lost", kind="x"))


class ForgetsWhatWasStopped(Exchange):
    """The answer moves, and nothing ends the offer of its cache."""

    def _stopped(self, stop: Any) -> Actions:
        return super()._stopped(replace(stop, params=None))


class LosesTheLastToken(Exchange):
    """What came with the stop is not sent."""

    def _stopped(self, stop: Any) -> Actions:
        self._has_lost = True
        return super()._stopped(stop)

    def events_arrived(self, events: Iterable[Event]) -> Actions:
        self._has_lost = False
        actions = super().events_arrived(events)
        return [each for each in actions if not (self._has_lost and isinstance(each, does.Send))]


class LeavesTheStoppedStreamOpen(Exchange):
    def _stopped(self, stop: Any) -> Actions:
        return [each for each in super()._stopped(stop) if not isinstance(each, does.EndDecode)]


class LoadsMoreThanItTells(Exchange):
    def _stopped(self, stop: Any) -> Actions:
        told, self.sent.followed = self.sent.beginning, Told()  # type: ignore[assignment]
        actions = super()._stopped(stop)
        self.sent.followed = told
        return actions


class GivesUpWithoutAnotherNode(Exchange):
    """An answer that no other node takes does not go back."""

    def no_decode_node(self, error: ApiError) -> Actions:
        return self._fail(error)


class GivesUpAfterAnError(Exchange):
    """The next node's error before its first token ends an answer that has begun."""

    _goes_on = False


class ShowsTheStop(Exchange):
    def _stopped(self, stop: Any) -> Actions:
        return [does.Send([stop.event]), *super()._stopped(stop)]


class ForgetsLosses(Exchange):
    """Prefill nodes that were lost are forgotten when the request begins anew."""

    def placed(self, *args: Any) -> Actions:
        self.lost = []
        return super().placed(*args)


class NeverDecodesAlone(Exchange):
    def no_prefill_node(self, error: ApiError, *, may_decode_alone: bool) -> Actions:
        return super().no_prefill_node(error, may_decode_alone=False)


#: A bug, and the beginning of the promise that it breaks.
BUGS: Mapping[type[Exchange], str] = {
    ForgetsTheRelease: "an offer that no node loads is released",
    ReleasesWhatWasLoaded: "an offer that was loaded is not released",
    RetriesAfterBytesWereSent: "",  # the stream begins twice, or what the client has is forgotten
    BeginsTheSecondHalfAnew: "the second half follows the tokens that the client has",
    EndsTwice: "the client gets exactly one end",
    AsksAfterTheEnd: "nothing is asked of a node after the end",
    SettlesTwice: "an offer is settled once",
    NeverSettlesForAClientThatLeft: "every offer is settled",
    BlamesTheDecodeNodeForAPrefill: "an error is given only if no node could answer",
    TriesBothAtOnceForever: "both are not asked at once again after that has failed",
    LeavesThePrefillRunning: "",  # a second one begins, or it outlasts the exchange
    LeavesTheDecodeRunning: "",  # likewise
    DropsAnEvent: "the client gets each byte of one answer, once and in order",
    GivesAnswersUp: "an error is given only if no node could answer",
    MovesWithTheFirstEventOnly: "",  # a node that goes on knows too little, or a stop is not noticed
    ForgetsWhatItPassedOn: "",  # the next node is told too few tokens
    PassesAnEndOn: "",  # an end is taken for a part of the answer
    MovesAnswersThatAreOver: "no node is asked to go on with an answer that is over",
    MovesToTheLostNode: "a node that was lost is not asked again",
    LeavesTheLostStreamOpen: "",  # a second one begins, or it outlasts the exchange
    GoesOnAfterOtherTokens: "the client gets each byte of one answer, once and in order",
    GivesUpAtTheFirstLoss: "an error is given only if no node could answer",
    ForgetsWhatWasStopped: "a stopped answer is loaded or released",
    LosesTheLastToken: "",  # the next node is told too many tokens, or the client lacks one
    LeavesTheStoppedStreamOpen: "",  # a second one begins, or it outlasts the exchange
    LoadsMoreThanItTells: "a node loads only what it is told",
    GivesUpWithoutAnotherNode: "an error is given only if no node could answer",
    GivesUpAfterAnError: "an error after a token moves the answer",
    BelievesAClosedConnection: "the client gets each byte of one answer, once and in order",
    BelievesThatAnAnswerIsWhole: "a whole answer is not cut off",
    RemembersTheNodeBefore: "the client gets each byte of one answer, once and in order",
    LeavesTheCountsOut: "the client gets each byte of one answer, once and in order",
    ShowsTheStop: "the client gets each byte of one answer, once and in order",
    ForgetsLosses: "a request that was with three lost nodes is given to no other",
    NeverDecodesAlone: "an error is given only if no node could answer",
}
