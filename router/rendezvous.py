"""Ask both nodes at once: the prefill node offers by a name that the router drew, and the decode node claims by it.

Where that is not possible, the decode node is asked after the prefill node. A health check learns where a prefill node can be
reached; a node that does not say it there, for want of a key, says it in its first answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..connector.p2p.params import RENDEZVOUS, draw_rendezvous_name, prefill_chunk_of, rendezvous_params
from ..web.errors import ApiError
from ..web.json_body import object_of
from .first_tokens import is_single_token
from .metrics import RouterMetrics
from .nodes import NodeGoneError, NodePool, NoNodeError, UpstreamNode
from .phases import Call, Offer, open_prefill, params_of
from .prefills import Prefill

logger = logging.getLogger(__name__)

#: After the decode node's answer has ended, wait this long for the end of the prefill node's.
LAST_ANSWER_S = 0.5
#: Rendezvous at one prefill node at a time. More prompts would wait in a queue there, and decode nodes would hold blocks
#: meanwhile.
MAX_AT_PREFILL_NODE = 8
#: Of text in most languages.
BYTES_PER_TOKEN = 4


class LostPrefillError(Exception):
    """The prefill node failed before the decode node answered. Both can be asked again, one after the other."""


@dataclass
class _Meeting:
    """One attempt.

    Attributes:
        patience: Expires when the prefill has failed while the decode node still waits for it.
        answered: The offer as the prefill node has answered it.
        is_answered: The decode node has answered. From now on a failure of the prefill is the decode node's concern.
        failure: Why the prefill failed.
    """

    patience: asyncio.Timeout
    answered: asyncio.Future[Offer]
    is_answered: bool = False
    failure: Exception | None = None

    def settle(self) -> None:
        self.is_answered = True

    def fail(self, error: Exception) -> None:
        self.failure = error
        self.patience.reschedule(asyncio.get_running_loop().time())


class RendezvousPrefill(Prefill):
    """Starts prefill and decode at once, if both nodes can do that.

    If the prefill fails before the decode node answers, the decode request is ended too, and the router starts again. After that
    the decode node recomputes the prompt or fails the request, as its load failure policy says.

    Args:
        otherwise: Prefills the other prompts.
        first_token: See `Prefill`. The decode node has been asked then, and chooses the token as well.
    """

    def __init__(
        self,
        otherwise: Prefill,
        pool: NodePool,
        decode_pool: NodePool,
        metrics: RouterMetrics,
        *,
        first_token: bool,
    ) -> None:
        super().__init__(pool, metrics, first_token=first_token)
        self._otherwise = otherwise
        self._decode_pool = decode_pool
        self._num_at: Counter[str] = Counter()  # rendezvous under way, by the prefill node's URL

    @contextlib.asynccontextmanager
    async def prefilled(self, call: Call) -> AsyncIterator[Offer | None]:
        name = draw_rendezvous_name()
        node = self._pool.likely(call.body, call.turn.preferred_url)
        if node is None or (params := self._params(call, node, name)) is None:
            async with self._otherwise.prefilled(call) as offer:
                yield offer
            return
        self._metrics.rendezvous.inc()
        self._num_at[node.url] += 1
        meeting = _Meeting(asyncio.timeout(None), asyncio.get_running_loop().create_future())
        try:
            async with meeting.patience:
                follower = asyncio.create_task(self._follow(call, node, name, meeting))
                try:
                    # One turn of the event loop, in which the follower sends its request: the prefill node needs it first.
                    await asyncio.sleep(0)
                    yield Offer(node, params, follower.cancel, meeting.answered, meeting.settle)
                    await asyncio.wait({follower}, timeout=LAST_ANSWER_S)
                finally:
                    follower.cancel()
                    await asyncio.gather(follower, return_exceptions=True)
        except TimeoutError:
            if meeting.failure is None or not meeting.patience.expired():
                raise
            if isinstance(meeting.failure, ApiError) and not isinstance(meeting.failure, NoNodeError):
                raise meeting.failure from None  # the prefill node's refusal is the client's answer
            raise LostPrefillError(str(meeting.failure)) from meeting.failure
        finally:
            self._num_at[node.url] -= 1
            self._num_at += Counter()  # drops the nodes without any

    def _params(self, call: Call, node: UpstreamNode, name: str) -> dict[str, Any] | None:
        """Return the params for the decode node; None if the two cannot be asked at once."""
        decode_node = self._decode_pool.likely(call.body)
        if (
            decode_node is None
            or not decode_node.has_rendezvous
            or self._num_at[node.url] >= MAX_AT_PREFILL_NODE
        ):
            return None
        if not call.may_meet or _needs_answer(call.body):
            return None
        if call.turn.has_answer:
            return None  # the prefill node loads the last turn's answer, and params have room for one name
        if self.passes_first(call, decode_node) and (
            is_single_token(call.body)  # the prefill node alone can answer it
            # There is nothing to offer early, and a decode node that continues after the token needs one step less.
            or _size_in_tokens(call.body) <= prefill_chunk_of(node.rendezvous_place)
        ):
            return None
        return rendezvous_params(name, node.rendezvous_place)

    async def _follow(self, call: Call, node: UpstreamNode, name: str, meeting: _Meeting) -> None:
        body = self._body(call, node, None)
        body["kv_transfer_params"][RENDEZVOUS] = name
        try:
            async with (
                self._pool.use_one({}, lambda other: other is node, body=call.body),
                open_prefill(call, node, body) as response,
            ):
                answer = object_of(response.payload)
                call.timeline.prefill_ended(answer)
                params = params_of(answer)
                self._note_params(call, node, params)
                if params is None:
                    raise NodeGoneError(node, "offered no KV cache", may_eject=False)
                first = self._first_of(call, answer)
                meeting.answered.set_result(Offer(node, params, first=first, headers=response.headers))
        except (NodeGoneError, ApiError) as error:
            if not meeting.is_answered:
                meeting.fail(error)
                return
            logger.warning("%s: the prefill was lost after its decode had begun: %s", call.request_id, error)
            self._metrics.lost_prefills.inc()


def _size_in_tokens(body: Mapping[str, Any]) -> int:
    """Return about how many tokens a prompt has."""
    prompt = body.get("messages") or body.get("prompt") or ""
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return len(prompt)
    return len(json.dumps(prompt, ensure_ascii=False).encode()) // BYTES_PER_TOKEN


def _needs_answer(body: Mapping[str, Any]) -> bool:
    """Whether the decode node needs something of the prefill node's answer: log probabilities of the prompt."""
    return bool(body.get("echo")) or body.get("prompt_logprobs") is not None
