"""The prefill phase of a request, where the decode starts after the whole prompt."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from ..web.json_body import object_of
from .first_tokens import FirstToken, first_token_of, is_expected, is_possible, is_stitchable, wish_for
from .handoffs import TRANSFER_HEADER
from .metrics import ANSWER_RESULTS, RouterMetrics
from .nodes import NodeGoneError, NodePool, Tried, UpstreamNode
from .phases import (
    Call,
    Offer,
    UpstreamAnswer,
    open_prefill,
    params_of,
    prefill_body,
)
from .reading import NodeAnswer
from .sessions import Answer

logger = logging.getLogger(__name__)

#: After an answer has ended, wait this long for the end of its prefill's stream.
LAST_EVENTS_S = 5.0

Params = Mapping[str, Any] | None
Events = AsyncGenerator[Mapping[str, Any], None]


class Prefill(ABC):
    """Runs prefills on the nodes of a pool, and retries at another node if one fails.

    Args:
        first_token: Ask prefill nodes for the first token of the answer, where that is possible.
    """

    def __init__(self, pool: NodePool, metrics: RouterMetrics, *, first_token: bool) -> None:
        self._pool = pool
        self._metrics = metrics
        self._first_token = first_token

    def passes_first(self, call: Call, decode_node: UpstreamNode) -> bool:
        """Whether the client will probably receive the first token from the prefill node, so that the decode waits for it."""
        return self._first_token and is_expected(call.body, call.path, decode_node.abilities)

    def _body(self, call: Call, node: UpstreamNode, answer: Answer | None) -> dict[str, Any]:
        params = None if answer is None else answer.params
        is_vllm = node.abilities.vllm_max_model_len > 0
        # A node of ours decides for itself whether it passes the token on.
        is_token_used = self._first_token and is_possible(call.body)
        if is_vllm:
            is_token_used = is_token_used and is_stitchable(call.body, call.path)
        wish = wish_for(call.body) if is_token_used else None
        body = prefill_body(call.body, wish=wish, answer=params, is_token_used=is_token_used)
        if is_vllm and is_token_used:
            body["return_token_ids"] = True
            # The likeliest token does not depend on it, and vLLM on a CPU dies of a seeded prompt of several chunks.
            body.pop("seed", None)
        return body

    def _first_of(self, call: Call, answer: Mapping[str, Any]) -> FirstToken | None:
        return first_token_of(call.body, call.path, answer) if self._first_token else None

    @abstractmethod
    def prefilled(self, call: Call) -> AbstractAsyncContextManager[Offer | None]:
        """Prefill a prompt. Leaving the block early ends the prefill.

        Yields:
            The offer for the decode node. None if the prefill node made none.

        Raises:
            NoNodeError: No node can do it.
            UpstreamAnswer: A node refused the request.
        """

    def _note_failed(
        self, call: Call, answer: Answer | None, tried: Tried, error: NodeGoneError | UpstreamAnswer
    ) -> None:
        """Note an attempt that failed. If the node was to load an answer, it is tried again without.

        Raises:
            UpstreamAnswer: The node refused the request, and not for an answer.
        """
        if answer is not None:
            # A node whose policy is to fail such a request would otherwise let the client pay for an offer that has expired.
            logger.info("%s: prefill without the cache of the last answer: %s", call.request_id, error)
            self._metrics.answers.labels("failed").inc()
            tried.clear()
        elif isinstance(error, UpstreamAnswer):
            raise error
        else:
            self._note_gone(call, error)

    def _note_load(self, answer: Answer | None, response: NodeAnswer) -> None:
        if answer is not None:
            result = response.headers.get(TRANSFER_HEADER, "unknown")
            self._metrics.answers.labels(result if result in ANSWER_RESULTS else "unknown").inc()

    def _note_gone(self, call: Call, error: NodeGoneError) -> None:
        logger.warning("%s: prefill: %s", call.request_id, error)
        self._metrics.retries.labels("prefill").inc()

    def _note_params(self, call: Call, node: UpstreamNode, params: Params) -> None:
        node.note_params(params)
        call.turn.prefill_url = node.url
        if params is None:
            logger.debug("%s: %s offered no KV cache", call.request_id, node.url)


class WholePrefill(Prefill):
    """Starts the decode after the whole prompt is computed. Works with every node that speaks vLLM's protocol."""

    @contextlib.asynccontextmanager
    async def prefilled(self, call: Call) -> AsyncIterator[Offer | None]:
        yield await self._offer(call)

    async def _offer(self, call: Call) -> Offer | None:
        tried: Tried = {}
        while True:
            answer = call.turn.take_answer()
            try:
                async with (
                    self._pool.use_one(tried, body=call.body, preferred=call.turn.preferred_url) as node,
                    open_prefill(call, node, self._body(call, node, answer)) as response,
                ):
                    result = object_of(response.payload)
                    call.timeline.prefill_ended(result)
                    params = params_of(result)
                    self._note_load(answer, response)
            except (NodeGoneError, UpstreamAnswer) as error:
                self._note_failed(call, answer, tried, error)
            else:
                self._note_params(call, node, params)
                if params is None:
                    return None
                return Offer(node, params, first=self._first_of(call, result), headers=response.headers)
