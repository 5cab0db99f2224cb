"""The first token of an answer goes from the prefill node to the client, and the decode node continues after it.

The prefill node samples this token anyway. Two keys of ours in `kv_transfer_params` pass it on; connectors ignore both:

- A router asks a prefill node with `want_first_token`: `{"max_tokens": n, "include_usage": false}`, as in the client's
  request; null or absent means the default. The prefill node's answer then has `first_token`:

      token_id  the token
      model     digest of what decides an answer: only a decode node with the same one may continue it
      created   the `created` of all parts of the answer
      is_all    whether the answer ends with this token
      chunks    what a single node would have streamed so far: one chunk, or the whole stream if `is_all`

- The router sends `{"token_id": ..., "created": ..., "model": ...}` as `first_token` to a decode node, whose answer is then that
  of a single node: its stream begins with the second token, and everything else counts and contains the first one. A node with
  another digest refuses (503): it may have been restarted with another model since the router has asked it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...web.fields import Fields
from ..engine.types import RequestOutput, SamplingParams
from .replies import Choice, Envelope

WANT_FIRST_TOKEN = "want_first_token"
FIRST_TOKEN = "first_token"


@dataclass(frozen=True)
class FirstTokenWish:
    """A router's wish to receive the first token of an answer that another node continues.

    Attributes:
        max_tokens: Length limit of the whole answer; None for the default.
        include_usage: Whether the stream ends with a chunk that has the usage.
    """

    max_tokens: int | None
    include_usage: bool


@dataclass(frozen=True)
class KnownToken:
    """The first token of an answer, as a prefill node chose it.

    Attributes:
        created: Seconds since 1970, for all parts of the answer.
        model: Digest of the node that chose it. Empty: the router does not say.
    """

    token_id: int
    created: int
    model: str = ""


def take_first_token(
    params: Mapping[str, Any] | None,
) -> tuple[Mapping[str, Any] | None, FirstTokenWish | None, KnownToken | None]:
    """Take what is about the first token out of `kv_transfer_params`.

    Returns:
        The other params, what a prefill node is asked for, and what a decode node is given.

    Raises:
        ApiError: A value has the wrong type (400).
    """
    if params is None or not params.keys() & {WANT_FIRST_TOKEN, FIRST_TOKEN}:
        return params, None, None
    others = {key: value for key, value in params.items() if key not in (WANT_FIRST_TOKEN, FIRST_TOKEN)}
    fields = Fields(params)
    wish = known = None
    if (asked := fields.optional_mapping(WANT_FIRST_TOKEN)) is not None:
        inner = Fields(asked)
        wish = FirstTokenWish(
            inner.optional_integer("max_tokens"), inner.boolean("include_usage", default=False)
        )
    if (given := fields.optional_mapping(FIRST_TOKEN)) is not None:
        inner = Fields(given)
        known = KnownToken(
            inner.integer("token_id", -1), inner.integer("created", 0), inner.text("model", "")
        )
    return others, wish, known


def may_pass_on(sampling: SamplingParams) -> bool:
    """Whether the first token of an answer is the same at a prefill node and at a single node.

    It is if it is the likeliest one, or drawn from a seeded stream, which the decode node continues. Log probabilities would
    have to be passed on as well, so requests for them are left to the decode node.
    """
    is_determined = sampling.temperature == 0.0 or sampling.seed is not None
    asks_for_scores = (
        sampling.num_logprobs is not None
        or sampling.num_prompt_logprobs is not None
        or sampling.num_top_logits
    )
    return is_determined and not asks_for_scores


def passed_on(
    envelope: Envelope, output: RequestOutput, *, model_digest: str, include_usage: bool
) -> dict[str, Any]:
    """Return the `first_token` of a prefill node's answer.

    Args:
        output: The only piece of that answer.
        model_digest: The engine's.
    """
    is_all = not output.is_unfinished
    # The client sees the answer, which goes on, and not the prefill, which ends and offers a cache.
    output = replace(output, kv_transfer_params=None, finish_reason=output.finish_reason if is_all else None)
    choice = Choice(0, None)
    chunks = [envelope.chunk(choice, choice.add(output))]
    if is_all and include_usage:
        chunks.append(envelope.usage_chunk([choice]))
    return {
        "token_id": output.new_token_ids[0],
        "model": model_digest,
        "created": envelope.created,
        "is_all": is_all,
        "chunks": chunks,
    }
