"""The scheduler half as vLLM's scheduler calls it: no request, however malformed, may raise here."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Self, cast

from ...transports.errors import ConfigurationError, KVTransferError
from ..errors import ConnectorError
from ..handoff.events import GroupBlocks
from ..handoff.messages import MAX_TEXT_CHARS
from ..output import KVConnectorOutput
from ..p2p.params import (
    CLIENT_REQUEST_ID,
    IDENTITY,
    IDENTITY_FIELDS,
    KV_EVENTS,
    LOAD_ERROR,
    MOVED,
    REFUSED_TO_CONTINUE,
    RENDEZVOUS_SUPPORTED,
    SPANS,
    STOPPED_TO_MOVE,
    TRACEPARENT,
    TransferWish,
    parse_transfer_params,
    traceparent_of,
)
from ..p2p.registration import NO_FIELDS
from ..p2p.scheduler import HandoffScheduler
from ..planning.compatibility import answers_digest
from ..spans import ServerSpans
from .lora import adapter_identity
from .metadata import LoadErrors, RefusedLoad, StepMetadata, WorkerHandshake
from .request_spans import RequestSpans
from .sharing import SharedOffers
from .stats import KvferryStats
from .windows import WindowBlocks

if TYPE_CHECKING:
    import torch

    from ..base import SchedulerOutput

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Item:
    """An image, a sound or another item among a prompt's tokens."""

    identifier: str
    offset: int
    length: int


@dataclass(frozen=True)
class VllmRequest:
    """One of vLLM's requests in the form of `ConnectorRequest`."""

    request_id: str
    prompt_token_ids: Sequence[int]
    all_token_ids: Sequence[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    kv_transfer_params: Mapping[str, Any] | None
    finish_reason: str | None
    cache_salt: str | None
    lora_id: str | None
    mm_features: Sequence[_Item]
    prompt_embeds: torch.Tensor | None

    @classmethod
    def of(cls, request: Any, num_left_out: int = 0) -> Self:
        """Translate vLLM's request, without the last `num_left_out` tokens of its prompt."""
        reason = request.get_finished_reason()
        token_ids = request.prompt_token_ids or ()
        return cls(
            request.request_id,
            # No copy for each step of a long prompt.
            token_ids[:-num_left_out] if num_left_out else token_ids,
            request.all_token_ids,
            request.num_prompt_tokens - num_left_out,
            request.num_computed_tokens,
            _traced_params(request),
            None if reason is None else str(reason),
            request.cache_salt,
            adapter_identity(request.lora_request),
            [
                _Item(feature.identifier, feature.mm_position.offset, feature.mm_position.length)
                for feature in request.mm_features
            ],
            request.prompt_embeds,
        )


def _named_by_client(request: Any) -> str:
    """Return the `X-Request-Id` in a request's params; empty if there is none."""
    params = request.kv_transfer_params
    name = params.get(CLIENT_REQUEST_ID) if isinstance(params, dict) else None
    return name if isinstance(name, str) and len(name) <= MAX_TEXT_CHARS else ""


def client_request_id(request_id: str) -> str:
    """Return the id that a client gave, of an id of the engine: `chatcmpl-ID-RANDOM`, `cmpl-ID-0-RANDOM` or
    `ID-RANDOM`.
    """
    from vllm import envs

    is_random = not getattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", False)
    outer = request_id.rpartition("-")[0] if is_random else request_id
    kind, _, inner = outer.partition("-")
    if kind == "chatcmpl":
        return inner
    return inner.rpartition("-")[0] if kind == "cmpl" else outer


def _can_be_cut(request: Any) -> bool:
    """Whether the last token can be left out of the prompt of a request whose recurrent state is to be
    offered.

    The decode node computes that token itself, and a state cannot be moved back by one token. The single
    token of this node's answer then follows the shorter prompt, so it means nothing. A request that wants
    more from this node keeps its prompt: it gets the right answer, and the half does not offer its state.
    """
    sampling = request.sampling_params
    wants_only_the_offer = (
        sampling is not None and sampling.prompt_logprobs is None and request.max_tokens == 1
    )
    return wants_only_the_offer and request.num_prompt_tokens > 1


def _leave_out_last_token(request: Any) -> None:
    for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
        if (part := getattr(request, name, None)) is not None:
            setattr(request, name, part[:-1])  # a copy, because vLLM's front end may hold the same list
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1


def _end_at_once(request: Any, identity: str) -> None:
    """End a request with its first token, and say so in its stop reason, where also a stream shows it.

    vLLM gives a connector no way to fail a request under the policy `recompute`, and a recomputed prompt does
    not help here: its last token is another model's. No client receives the token that this leaves, because
    only a router sends such requests.
    """
    request.max_tokens = 1
    # A router looks for an answer that ends by `length`: a client's stop text ends one by `stop`, as these
    # tokens would. Before `min_tokens` some versions of vLLM end nothing. A copy, because vLLM's front end
    # may hold the same object.
    request.sampling_params = sampling = copy(request.sampling_params)
    sampling.stop_token_ids, sampling._eos_token_id, sampling.min_tokens = [], None, 0
    request.stop_reason = (
        f"{REFUSED_TO_CONTINUE}the answer is that of a node with another model; this node is "
        f"{identity[:16] or 'not known'}"
    )
    logger.warning("request %r: %s", request.request_id, request.stop_reason)


def _traced_params(request: Any) -> Mapping[str, Any] | None:
    """Return a request's params with the trace context that vLLM took from the HTTP headers, if it traces."""
    params: Mapping[str, Any] | None = request.kv_transfer_params
    headers = getattr(request, "trace_headers", None) or {}
    return {**params, TRACEPARENT: headers[TRACEPARENT]} if params and TRACEPARENT in headers else params


@dataclass(frozen=True)
class _Step:
    """One of vLLM's steps in the form of `SchedulerOutput`, as far as the half reads it."""

    preempted_req_ids: frozenset[str]


@dataclass
class _Movable:
    """A request whose answer another node may go on with.

    Attributes:
        request: vLLM's.
        name: By which a router can have it stopped.
        is_stopped: It has been asked for, and ends with its next token.
    """

    request: Any
    name: str
    is_stopped: bool = False

    def stop(self) -> bool:
        """End the answer with the next token that vLLM has not begun to compute.

        False: it ends by itself, or is stopped already.
        """
        request = self.request
        # vLLM may have scheduled a step ahead; the tokens of that are not told yet.
        num_tokens = request.num_output_tokens + getattr(request, "num_output_placeholders", 0)
        if self.is_stopped or num_tokens + 1 >= request.max_tokens:
            return False
        request.max_tokens, self.is_stopped = num_tokens + 1, True
        return True


@dataclass
class _Early:
    """A request that is to be offered while its prompt is computed.

    Attributes:
        request: vLLM's.
        tables: Per group, its blocks so far; empty before its first step.
        num_ready: Tokens that are offered.
    """

    request: Any
    tables: tuple[list[int], ...] = ()
    num_ready: int = 0


class SchedulerSide:
    """Translates vLLM's calls, and turns each request that the half refuses into a load that fails.

    A refusal cannot be raised to vLLM's scheduler, because an exception ends the engine. So a refused request
    gets blocks as for any load, and a worker half reports at once that the load failed. Then vLLM's own
    policy, `kv_load_failure_policy`, decides between an error for the client and computing the prompt here.

    Args:
        shared, windows: Empty; they belong to this object from now on.
        served_groups: Indices of the groups that are handed over, of all that vLLM has block tables of;
            empty: all of them.
        can_meet: Whether a router can name an offer of this node in advance: it cannot where several engines
            share an address.
        can_be_early: Whether a prompt may be offered while it is computed. If vLLM zeroes blocks before it
            uses them, its second model runner zeroes those of a preempted request before we can end the
            request's open offer.
        answer_fields: What decides this node's answers, besides the fields of its worker halves.
        can_continue: Whether this node's settings let another one go on with its answers.
        publisher: Where vLLM publishes its KV events; empty if it does not.
    """

    def __init__(
        self,
        half: HandoffScheduler,
        shared: SharedOffers,
        windows: WindowBlocks,
        served_groups: Sequence[int] = (),
        *,
        can_meet: bool = True,
        can_be_early: bool = True,
        answer_fields: Mapping[str, str | int] = NO_FIELDS,
        can_continue: bool = True,
        publisher: Mapping[str, Any] = NO_FIELDS,
    ) -> None:
        self._publisher = publisher
        self._can_meet = can_meet
        self._can_be_early = can_be_early
        self._answer_fields = answer_fields
        self._can_continue = can_continue
        self._fields: Mapping[str, str | int] = NO_FIELDS  # of the worker halves; empty: not known now
        self._loaded_fields: Mapping[str, str | int] = NO_FIELDS
        self._start = ""
        self._begins_anew = False
        #: Whether vLLM has computed something since its prefix cache was last reset. The code that resets the
        #: cache clears it.
        self.has_computed = False
        self._is_asleep = False
        self._knows_weights = True
        self._owing: dict[str, Any] = {}  # by request: vLLM's, if it asked for an offer
        self._early: dict[str, _Early] = {}
        self._movable: dict[str, _Movable] = {}  # by request
        self._half = half
        self._shared = shared
        self._windows = windows
        self._served_groups = served_groups
        self._refused: dict[str, str] = {}  # by request: why; until it has blocks
        self._refused_loads: dict[str, RefusedLoad] = {}  # of the next step
        self._load_errors: dict[str, str] = {}  # by request: why its load has failed; empty while it loads
        self._must_yield: set[str] = set()  # whose load has failed, until they have let others go first
        self._spans = RequestSpans()
        self._to_explain: dict[str, str] = {}  # by request: the one whose spans its answer is to tell

    @property
    def num_remembered_requests(self) -> int:
        num_own = len(self._refused) + len(self._refused_loads) + len(self._early) + len(self._movable)
        num_own += len(self._load_errors) + len(self._must_yield) + len(self._spans) + len(self._to_explain)
        num_own += len(self._owing)
        return self._half.num_requests + self._shared.num_requests + self._windows.num_requests + num_own

    def bind_block_pool(self, pool: Any) -> None:
        """Take vLLM's block pool, to keep blocks that an offer needs."""
        self._windows.bind(pool)

    @property
    def identity(self) -> str:
        """Digest of what decides this node's answers now.

        Empty: it is not known, or not enough to continue an answer.

        Then no node continues another one's answers.
        """
        if not self._fields or not self._can_continue:
            return ""
        return answers_digest({**self._fields, **self._answer_fields}, of_one_start=self._start)

    def set_handshake_metadata(self, metadata: Mapping[int, WorkerHandshake]) -> None:
        """Learn where the workers can be reached, by rank.

        Raises:
            ConfigurationError: they are another connector's; vLLM does not start.
        """
        for worker in metadata.values():
            if not isinstance(worker, WorkerHandshake):
                raise ConfigurationError(
                    f"cannot learn where the workers listen: vLLM's MultiConnector gives every connector the handshake "
                    f"of the first one that has any, here a {type(worker).__name__!r}; use KvferryConnector without "
                    f"another connector that hands caches over between nodes"
                )
        self._half.set_handshake_metadata({rank: worker.address for rank, worker in metadata.items()})
        first = metadata[min(metadata)]
        # A node that wakes learns them again.
        self._fields = first.fields if self._knows_weights else NO_FIELDS
        self._start = f"{first.address.epoch:x}"
        self._loaded_fields = first.fields

    @property
    def loaded_weights(self) -> str:
        """What the worker halves describe their weights as that were loaded at the start."""
        return str(self._loaded_fields.get("weights", ""))

    def describe_weights(self, weights: str) -> None:
        """Note that the worker halves have other weights now, and end what was computed with others.

        Args:
            weights: As the worker halves describe them to peers. Empty: not known, so nothing is offered.
        """
        self._fields = {**self._loaded_fields, "weights": weights} if weights else NO_FIELDS
        self._knows_weights = bool(weights)
        self._half.may_offer = self._knows_weights and not self._is_asleep
        self._half.end_offers()

    def fall_asleep(self) -> None:
        """End every handoff, with the next step, and offer nothing more: vLLM sleeps once no request is left.

        An offer would keep it awake until its lease is over.
        """
        self._is_asleep, self._half.may_offer = True, False
        self.reset_cache()

    def wake_up(self) -> None:
        self._is_asleep, self._half.may_offer = False, self._knows_weights

    def reset_cache(self) -> None:
        """End every handoff, with the next step."""
        self._half.end_offers()
        self._begins_anew = True

    def on_new_request(self, request: Any) -> None:
        request_id, prompt = request.request_id, request.prompt_token_ids or ()
        # Outside of the `try`, because a request that is refused is followed too. So nothing may be assumed
        # of its params here.
        headers = getattr(request, "trace_headers", None) or {}
        traceparent = traceparent_of(headers) or traceparent_of(request.kv_transfer_params)
        self._spans.arrived(request, _named_by_client(request) or client_request_id(request_id), traceparent)
        try:
            wish = parse_transfer_params(request.kv_transfer_params)
            if wish.explain:
                self._to_explain[request_id] = wish.explain
            if wish.continues and not self._may_continue(request, wish.continues):
                _end_at_once(request, self.identity)
                return
            if wish.move:
                self._stop(wish.move)
            if wish.move_as:
                self._movable[request_id] = _Movable(request, wish.move_as)
            is_unnamed = bool(request.mm_features) and not self._shared.has_prefix_cache
            if is_unnamed:
                wish = self._without_unnamed_media(request, wish)
            if not self._shared.follow(request_id, wish, prompt):
                is_cut = wish.offer_result and self._half.offers_state and _can_be_cut(request)
                ours = VllmRequest.of(request, int(is_cut))
                self._half.on_new_request(replace(ours, kv_transfer_params=None) if is_unnamed else ours)
                if is_cut:  # only now, because a request that was refused is answered as it is
                    _leave_out_last_token(request)
                self._shared.lead(request_id, wish, prompt)
                if wish.offer_result:
                    self._owing[request_id] = request
                    self._windows.follow(request_id, request.num_prompt_tokens)
                if wish.rendezvous and self._can_be_early:
                    self._early[request_id] = _Early(request)
        except KVTransferError as error:
            logger.warning("request %r cannot be handed over: %s", request_id, error)
            self._refused[request_id] = str(error)
            # vLLM reads them once more after us, and assumes that they are a dictionary. A dictionary stays
            # as it is: beside us in a MultiConnector there may be connectors with keys of their own in it.
            if not isinstance(request.kv_transfer_params, dict):
                request.kv_transfer_params = None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Say how many tokens can be loaded; `None` asks vLLM to call again in the next step."""
        self._spans.found(request.request_id, num_computed_tokens)
        if self._shared.is_waiting(request.request_id):
            return None, False
        if request.request_id in self._must_yield:
            # vLLM frees the blocks of a failed load only when the request is the first of those that hold
            # blocks. If this one then finds too few free blocks, vLLM looks at no other request, so loads
            # that fail together would wait for each other for ever. `None` puts it behind them, once.
            self._must_yield.remove(request.request_id)
            return None, False
        if request.request_id not in self._refused:
            return self._half.get_num_new_matched_tokens(VllmRequest.of(request), num_computed_tokens)
        num_missing = request.num_prompt_tokens - num_computed_tokens
        return max(num_missing, 0), num_missing > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.has_computed = True  # or is about to, or loads
        self._spans.allocated(request.request_id, num_external_tokens)
        tables = self._served(blocks.get_block_ids())
        # vLLM calls once more after the load, without external tokens. Only then is the prompt in the prefix
        # cache, so requests that wait for it must not go on before.
        if not num_external_tokens:
            self._shared.end_load(request.request_id)
        else:
            self._load_errors[request.request_id] = ""
        reason = self._refused.pop(request.request_id, None)
        if reason is None:
            self._half.update_state_after_alloc(VllmRequest.of(request), tables, num_external_tokens)
        elif num_external_tokens:
            self._half.count_offered("refused")
            allocated = tuple(GroupBlocks(0, tuple(table)) for table in tables)
            self._refused_loads[request.request_id] = RefusedLoad(allocated, reason)

    def build_connector_meta(self, scheduler_output: Any = None) -> StepMetadata:
        begins_anew, self._begins_anew = self._begins_anew, False
        return replace(self._step_metadata(scheduler_output), begins_anew=begins_anew)

    def _step_metadata(self, scheduler_output: Any) -> StepMetadata:
        self._spans.step_begins()
        refused, self._refused_loads = self._refused_loads, {}
        self._windows.note_step(scheduler_output)
        for request_id in getattr(scheduler_output, "preempted_req_ids", None) or ():
            if (request := self._owing.get(request_id)) is not None and self._half.owes_offer(request_id):
                # A token of it that is being computed could end it now, when its blocks are gone.
                request.drop_stale_output = True
        is_idle = getattr(scheduler_output, "total_num_scheduled_tokens", 1) == 0
        if not self._early:
            return StepMetadata(self._half.build_connector_meta(), refused, is_idle=is_idle)
        preempted = self._take_preempted(scheduler_output)
        self._note_progress(scheduler_output)
        step = cast("SchedulerOutput", _Step(preempted))
        return StepMetadata(self._half.build_connector_meta(step), refused, preempted, is_idle)

    def _take_preempted(self, scheduler_output: Any) -> frozenset[str]:
        """Take the requests that lost their blocks.

        They are not offered early again: their consumers were denied.

        vLLM's own list is not enough: in some versions it lacks requests that a reset of the prefix cache
        preempted.
        """
        gone = set(getattr(scheduler_output, "preempted_req_ids", None) or ())
        gone |= set(getattr(scheduler_output.scheduled_cached_reqs, "resumed_req_ids", None) or ())
        gone |= {
            name for name, early in self._early.items() if early.request.num_computed_tokens < early.num_ready
        }
        return frozenset(name for name in gone if self._early.pop(name, None) is not None)

    def _note_progress(self, scheduler_output: Any) -> None:
        """Offer what earlier steps have computed of the prompts that are to be offered early.

        The step that is being scheduled has computed nothing yet. Neither has a prefix hit of its new
        requests, because vLLM enters blocks into the prefix cache when it schedules them. So only requests of
        earlier steps progress.
        """
        for new in scheduler_output.scheduled_new_reqs:
            if (early := self._early.get(new.req_id)) is not None:
                early.tables = tuple(list(table) for table in new.block_ids)
        cached = scheduler_output.scheduled_cached_reqs
        steps = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, blocks, num_computed in steps:
            early = self._early.get(request_id)
            if early is None or not early.tables:
                continue
            num_ready = min(num_computed, early.request.num_prompt_tokens)
            known = replace(VllmRequest.of(early.request), num_computed_tokens=num_ready)
            if num_ready > early.num_ready:
                early.num_ready = num_ready
                self._half.request_progressed(known, self._served(early.tables))
            for table, more in zip(early.tables, blocks or (), strict=False):
                table.extend(more)

    def update_connector_output(self, output: Any) -> None:
        for request_id in getattr(output, "failed_recving", None) or ():
            if request_id in self._load_errors:  # it has not ended
                self._must_yield.add(request_id)
            self._fail_followers(request_id)
        for request_id in output.finished_sending or ():
            self._windows.release(request_id)
        if isinstance(errors := getattr(output, "kv_connector_worker_meta", None), LoadErrors):
            # A request may have ended already: with the policy `fail` it has.
            known = {name: why for name, why in errors.reasons.items() if name in self._load_errors}
            self._load_errors |= known
        # Beside us in a MultiConnector the stats are of all connectors, and ours are not told apart here.
        if isinstance(stats := getattr(output, "kv_connector_stats", None), KvferryStats):
            for span in stats.figures.spans:
                self._spans.keep(span, client_request_id(span.request_id))
            self._spans.loaded(stats.figures.transfers)
        for request_id in output.finished_recving or ():
            # Before the reason may be dropped below.
            self._spans.load_ended(request_id, self._load_errors.get(request_id, ""))
            # A failed load's reason stays until its request ends; a load that succeeded has none to keep.
            if not self._load_errors.get(request_id):
                self._load_errors.pop(request_id, None)
        self._half.update_connector_output(
            KVConnectorOutput(
                finished_sending=set(output.finished_sending or ()),
                finished_recving=set(output.finished_recving or ()),
                invalid_block_ids=set(getattr(output, "invalid_block_ids", None) or ()),
                load_errors=dict.fromkeys(getattr(output, "failed_recving", None) or (), ""),
            )
        )

    def request_finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._refused.pop(request.request_id, None)
        self._early.pop(request.request_id, None)
        self._owing.pop(request.request_id, None)
        self._must_yield.discard(request.request_id)
        self._shared.leave(request.request_id)
        self._fail_followers(request.request_id)
        tables = self._served(self._windows.fill(request.request_id, block_ids))
        movable = self._movable.pop(request.request_id, None)
        ours = VllmRequest.of(request)
        is_moved = movable is not None and movable.is_stopped and ours.finish_reason == "length"
        ours = replace(ours, finish_reason=MOVED) if is_moved else ours
        keeps, params = self._half.request_finished(ours, tables)
        if not keeps:
            self._windows.release(request.request_id)
        if is_moved:
            # vLLM puts no params into a stream.
            request.stop_reason = STOPPED_TO_MOVE + json.dumps(params)
        completed = None if params is None else self._completed(params)
        if why := self._load_errors.pop(request.request_id, ""):
            completed = {**(completed or {}), LOAD_ERROR: why}
        self._spans.finished(request, ours.finish_reason or "")
        if wanted := self._to_explain.pop(request.request_id, ""):
            found = ServerSpans("vllm", self._half.engine_id, self._spans.find(wanted))
            completed = {**(completed or {}), SPANS: asdict(found)}
        return keeps, completed

    def _completed(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the params of an answer with what only this side knows."""
        params = dict(params)
        if not self._can_meet:
            params.pop(RENDEZVOUS_SUPPORTED, None)
        if "kv_role" in params:  # a description
            params[IDENTITY_FIELDS] = {**self._fields, **self._answer_fields}
            if self._publisher:
                params[KV_EVENTS] = self._publisher
            if identity := self.identity:
                params[IDENTITY] = identity
        return params

    def _may_continue(self, request: Any, identity: str) -> bool:
        """Say whether this node may continue an answer whose tokens a node with this identity chose."""
        return identity == self.identity and request.lora_request is None

    def _stop(self, name: str) -> None:
        """Stop the answer that may be moved by this name.

        If it has ended, the order came too late, which is no error.
        """
        movable = next((each for each in self._movable.values() if each.name == name), None)
        if movable is not None and movable.stop():
            self._half.request_stopping(VllmRequest.of(movable.request))

    def _served(self, tables: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the block tables of the groups that are handed over."""
        return [tables[group] for group in self._served_groups] if self._served_groups else tables

    def _without_unnamed_media(self, request: Any, wish: TransferWish) -> TransferWish:
        """Drop the wish of a request with images that cannot be told apart.

        Without a prefix cache vLLM does not name images by their content, so an offer for another image would
        be taken for this one's.

        Raises:
            ConnectorError: the request is to load such an offer.
        """
        why = (
            "without prefix caching vLLM does not tell one image from another; start it with "
            "--enable-prefix-caching to hand over prompts with images"
        )
        if wish.load_from is not None:
            raise ConnectorError(why)
        if wish.offer_result:
            logger.warning("not offering request %r: %s", request.request_id, why)
        return TransferWish()

    def _fail_followers(self, request_id: str) -> None:
        for follower in self._shared.end_load(request_id):
            self._refused[follower] = (
                f"request {request_id!r}, which was to load the same offer, did not load it"
            )
