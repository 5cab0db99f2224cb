"""Turn a request's tokens into the pieces that its client receives, and decide where the answer ends."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...connector.p2p.params import MOVED
from .detokenizer import IncrementalDetokenizer, StopMatcher, TokenDecoder
from .errors import InvalidRequestError
from .request import Request
from .types import FinishReason, GenerationRequest, RequestMetrics, RequestOutput


class Answer:
    """The answer to one request.

    Args:
        eos_token_ids: Tokens that end an answer.
        max_model_len: Longest sequence, prompt and answer together.

    Attributes:
        is_to_move: Another node is to go on with the answer, so it stops here after its next token.

    Raises:
        InvalidRequestError: The request's `known_token_ids` end the answer, so nothing follows them.
    """

    def __init__(
        self, request: Request, tokenizer: TokenDecoder, eos_token_ids: frozenset[int], max_model_len: int
    ) -> None:
        sampling = request.source.sampling
        self.request = request
        self.is_to_move = False
        self._detokenizer = IncrementalDetokenizer(tokenizer, request.source.prompt_token_ids)
        self._matcher = StopMatcher(sampling.stop)
        self._eos_token_ids = frozenset() if sampling.ignore_eos else eos_token_ids
        self._max_output_tokens = min(sampling.max_tokens, max_model_len - request.num_prompt_tokens)
        self._known_text: str | None = None
        if known := request.source.known_token_ids:
            # One after the other, so that what is held back here is what the other node held back.
            self._known_text = "".join(self._matcher.push(self._detokenizer.push(each)) for each in known)
            if self._reason_to_end(known[-1]) is not None or not self._eos_token_ids.isdisjoint(known):
                raise InvalidRequestError(
                    f"continues: these {len(known)} tokens end the answer; do not ask for more",
                    param="kv_transfer_params",
                )

    def push_last_token(self) -> tuple[str, FinishReason | None]:
        """Take in the request's newest token.

        Returns:
            The text to send, and why the answer ends here, or None.
        """
        figures = self.request.figures
        if figures.first_token_s is None:
            figures.first_token_s = time.monotonic()
        token_id = self.request.all_token_ids[-1]
        text = self._matcher.push(self._detokenizer.push(token_id))
        reason = self._reason_to_end(token_id)
        if reason is None:
            # The other node holds back the same text.
            return text, MOVED if self.is_to_move else None
        text += self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()
        return text, "stop" if self._matcher.matched else reason

    def _reason_to_end(self, token_id: int) -> FinishReason | None:
        if self._matcher.matched or token_id in self._eos_token_ids:
            return "stop"
        return "length" if self.request.num_output_tokens >= self._max_output_tokens else None

    def take_known_piece(self) -> RequestOutput | None:
        """Return an output with the request's `known_token_ids`, before the first new token; None if it has
        none.
        """
        if self._known_text is None:
            return None
        known, self._known_text = self._known_text, None
        known_token_ids = self.request.source.known_token_ids
        return replace(self._output(known_token_ids, known, None, "", None), is_known=True, logprobs=())

    def piece(self, text: str) -> RequestOutput:
        """Return an output with the newest token and its text."""
        return self._output((self.request.all_token_ids[-1],), text, None, "", None)

    def last_piece(
        self, text: str, reason: FinishReason, kv_transfer_params: Mapping[str, Any] | None
    ) -> RequestOutput:
        """Return the last output of an answer that ends with its newest token."""
        newest = (self.request.all_token_ids[-1],)
        return self._output(newest, text, reason, "", kv_transfer_params)

    def cut_off(self, reason: FinishReason, error: str = "") -> RequestOutput:
        """Return the last output of an answer that is ended from outside. It has no new token."""
        return self._output((), self._matcher.flush(), reason, error, None)

    def _output(
        self,
        token_ids: tuple[int, ...],
        text: str,
        reason: FinishReason | None,
        error: str,
        kv_transfer_params: Mapping[str, Any] | None,
    ) -> RequestOutput:
        logprobs = self.request.logprobs if token_ids else ()
        return RequestOutput(
            self.request.source.request_id,
            token_ids,
            text,
            reason,
            error,
            kv_transfer_params,
            self._metrics(),
            (logprobs,) if logprobs else (),
        )

    def _metrics(self) -> RequestMetrics:
        figures = self.request.figures
        return RequestMetrics(
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_output_tokens=self.request.num_output_tokens,
            num_cached_tokens=figures.num_cached_tokens,
            num_loaded_tokens=figures.num_loaded_tokens,
            num_preemptions=figures.num_preemptions,
            ttft_s=figures.ttft_s,
            transfer=figures.transfer,
            queue_s=figures.queue_s,
        )


def failed_answer(source: GenerationRequest, why: str) -> RequestOutput:
    """Return the only output of a request that could not be admitted."""
    num_prompt_tokens = len(source.prompt_token_ids)
    metrics = RequestMetrics(num_prompt_tokens, 0, 0, 0, num_preemptions=0, ttft_s=0.0, transfer=None)
    return RequestOutput(source.request_id, (), "", "error", why, None, metrics)
