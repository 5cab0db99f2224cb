"""An answer may begin at one node and go on at another one.

The prefill node samples the first token anyway, and a decode node may be lost in the middle. Two keys of ours in
`kv_transfer_params` pass on what there is of the answer; connectors ignore both:

- A router asks a prefill node with `want_first_token`: `{"max_tokens": n, "include_usage": false}`, as in the client's
  request; null or absent means the default. The prefill node's answer then has `first_token`:

      token_id  the token
      model     digest of what decides an answer: only a decode node with the same one may continue it
      created   the `created` of all parts of the answer
      is_all    whether the answer ends with this token
      chunks    what a single node would have streamed so far: one chunk, or the whole stream if `is_all`

- The router sends `{"token_ids": [...], "created": ..., "model": ...}` as `continues` to a decode node, whose answer is then that
  of a single node: its stream begins after these tokens, and everything else counts and contains them. Without tokens the answer
  begins here. A node with another digest refuses (503): it may have been restarted with another model since the router has asked.
  With `"move_as": NAME` the router may have the answer moved: it sends `{"move": NAME}`, and the answer stops after its next token
  with the `finish_reason` `"moved"` and the params of an offer of its cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...connector.p2p.params import CONTINUES, MOVE_AS
from ...web.errors import bad_request
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
class KnownAnswer:
    """The beginning of an answer, as other nodes chose it.

    Attributes:
        token_ids: Empty: the answer begins here.
        created: Seconds since 1970, for all parts of the answer. None: it begins here.
        model: Digest of the nodes that chose it. Empty: the router does not say.
        move_as: The name by which the answer can be moved. Empty: it cannot be.
    """

    token_ids: tuple[int, ...]
    created: int | None
    model: str = ""
    move_as: str = ""


def take_beginning(
    params: Mapping[str, Any] | None,
) -> tuple[Mapping[str, Any] | None, FirstTokenWish | None, KnownAnswer | None]:
    """Take what is about the beginning of the answer out of `kv_transfer_params`.

    Returns:
        The other params, what a prefill node is asked for, and what a decode node is given.

    Raises:
        ApiError: A value has the wrong type (400).
    """
    if params is None or not params.keys() & {WANT_FIRST_TOKEN, CONTINUES}:
        return params, None, None
    others = {key: value for key, value in params.items() if key not in (WANT_FIRST_TOKEN, CONTINUES)}
    fields = Fields(params)
    wish = known = None
    if (asked := fields.optional_mapping(WANT_FIRST_TOKEN)) is not None:
        inner = Fields(asked)
        wish = FirstTokenWish(
            inner.optional_integer("max_tokens"), inner.boolean("include_usage", default=False)
        )
    if (given := fields.optional_mapping(CONTINUES)) is not None:
        inner = Fields(given)
        token_ids = given.get("token_ids") or []
        if not isinstance(token_ids, list) or not all(type(each) is int for each in token_ids):
            raise bad_request("'continues.token_ids' must be a list of integers", "kv_transfer_params")
        created, model = inner.optional_integer("created"), inner.text("model", "")
        known = KnownAnswer(tuple(token_ids), created, model, inner.text(MOVE_AS, ""))
    return others, wish, known


def may_pass_on(sampling: SamplingParams) -> bool:
    """Whether the first token of an answer is the same at a prefill node and at a single node.

    It is if it is the likeliest one, or drawn from a seeded stream, which the decode node continues. Log probabilities would
    have to be passed on as well, so requests for them are left to the decode node.
    """
    is_determined = sampling.temperature == 0.0 or sampling.seed is not None
    return is_determined and not asks_for_scores(sampling)


def asks_for_scores(sampling: SamplingParams) -> bool:
    """Whether a request asks for log probabilities or logits, which only the node that computes a token has."""
    scores = sampling.num_logprobs, sampling.num_prompt_logprobs
    return any(number is not None for number in scores) or sampling.num_top_logits > 0


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
