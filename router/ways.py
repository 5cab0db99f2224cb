"""Which way a request goes: whether both nodes are asked at once, and which node chooses the first token of its answer.

All of this is decided in one table. `docs/router-design.md` has the same one. Pure: no clock, no socket.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..connector.p2p.params import draw_offer_name, prefill_chunk_of, rendezvous_params
from .beginnings import Abilities, is_possible, is_stitchable
from .exchange import Offer
from .first_tokens import is_expected, is_single_token

if TYPE_CHECKING:
    from .nodes import UpstreamNode

#: Requests at one prefill node at a time whose decode node was asked at once. More prompts would wait in a queue there, and
#: decode nodes would hold blocks meanwhile.
MAX_AT_ONCE = 8
#: Of text in most languages.
BYTES_PER_TOKEN = 4


class Way(enum.Enum):
    """When the decode node is asked."""

    IN_TURN = "in turn"
    AT_ONCE = "at once"


class Chooser(enum.Enum):
    """Which node chooses the first token. The prefill node's goes to the client only if the decode node can continue after it."""

    PREFILL = "prefill node"
    DECODE = "decode node"


@dataclass(frozen=True)
class Options:
    """What the user has switched on.

    Attributes:
        rendezvous: Ask both nodes at once, if both can do that.
        first_token: Send the client the first token of an answer as soon as the prefill node has it, where the result is provably
            that of a single node.
        continue_answers: Let another decode node go on with a streamed answer whose node is lost, where the result is provably
            that of a single node.
    """

    rendezvous: bool = True
    first_token: bool = True
    continue_answers: bool = True


@dataclass(frozen=True)
class Facts:
    """What decides.

    Attributes:
        may_ask_both: No attempt of this request has failed that way, and the client has no token yet.
        has_answer: The prefill node is to load the latest answer of the conversation.
        prefill, decode: The nodes that would be asked now. None: there is none, or it does not matter.
    """

    options: Options
    path: str
    body: Mapping[str, Any]
    may_ask_both: bool = True
    has_answer: bool = False
    prefill: UpstreamNode | None = None
    decode: UpstreamNode | None = None

    @property
    def expects_token(self) -> bool:
        """Whether the client will probably receive the first token from the prefill node."""
        abilities = Abilities() if self.decode is None else self.decode.abilities
        return self.options.first_token and is_expected(self.body, self.path, abilities)


class Row(NamedTuple):
    """A line of the table. It decides what is not None, unless a line before it has decided that."""

    when: str
    holds: Callable[[Facts], bool]
    way: Way | None
    chooser: Chooser | None


TABLE = (
    Row("`--rendezvous off`", lambda f: not f.options.rendezvous, Way.IN_TURN, None),
    Row("`--first-token off`", lambda f: not f.options.first_token, None, Chooser.DECODE),
    Row("`n` or `best_of` above 1, or `min_tokens`", lambda f: not is_possible(f.body), None, Chooser.DECODE),
    Row(
        "a server of vLLM, and a request whose answer cannot be put together from two",
        lambda f: _is_vllm(f.prefill) and not is_stitchable(f.body, f.path),
        *(None, Chooser.DECODE),
    ),
    Row(
        "the client has the token, or both were asked in vain",
        lambda f: not f.may_ask_both,
        Way.IN_TURN,
        None,
    ),
    Row(
        "`echo` or `prompt_logprobs`, for which the prefill node's answer is needed",
        lambda f: _needs_answer(f.body),
        Way.IN_TURN,
        None,
    ),
    Row(
        "the prefill node is to load the conversation's latest answer",
        lambda f: f.has_answer,
        Way.IN_TURN,
        None,
    ),
    Row(
        "the prefill node does not say where it can be reached",
        lambda f: _params("1" * 32, f.prefill) is None,
        Way.IN_TURN,
        None,
    ),
    Row(
        "the decode node does not say that it speaks kvferry's protocol",
        lambda f: f.decode is None or not f.decode.protocol,
        *(Way.IN_TURN, None),
    ),
    Row(
        "eight requests are at the prefill node in this way",
        lambda f: f.prefill is not None and f.prefill.num_at_once >= MAX_AT_ONCE,
        *(Way.IN_TURN, None),
    ),
    Row(
        "the prefill node's token is expected, and is all of the answer",
        lambda f: f.expects_token and is_single_token(f.body),
        Way.IN_TURN,
        None,
    ),
    Row(
        "the prefill node's token is expected, and the prompt fits into one step of the node",
        # There is nothing to offer early, and a decode node that continues after the token needs one step less.
        lambda f: (
            f.expects_token
            and f.prefill is not None
            and size_in_tokens(f.body) <= prefill_chunk_of(f.prefill.place)
        ),
        *(Way.IN_TURN, None),
    ),
    Row("otherwise", lambda f: True, Way.AT_ONCE, Chooser.PREFILL),
)


def way_of(facts: Facts) -> Way:
    """Decide when the decode node is asked."""
    return next(row.way for row in TABLE if row.way is not None and row.holds(facts))


def chooser_of(facts: Facts) -> Chooser:
    """Decide which node chooses the first token, as far as the prefill node is concerned."""
    return next(row.chooser for row in TABLE if row.chooser is not None and row.holds(facts))


def named_offer(facts: Facts) -> Offer | None:
    """Name the offer that a prefill node is to make, if the decode node is asked at once; otherwise None."""
    if facts.prefill is None or way_of(facts) is Way.IN_TURN:
        return None
    name = draw_offer_name()
    params = _params(name, facts.prefill)
    return None if params is None else Offer(facts.prefill, params, name)


def _params(name: str, prefill: UpstreamNode | None) -> dict[str, Any] | None:
    return None if prefill is None else rendezvous_params(name, prefill.place)


def _is_vllm(node: UpstreamNode | None) -> bool:
    return node is not None and node.abilities.vllm_max_model_len > 0


def size_in_tokens(body: Mapping[str, Any]) -> int:
    """Return about how many tokens a prompt has."""
    prompt = body.get("messages") or body.get("prompt") or ""
    if isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
        return len(prompt)
    return len(json.dumps(prompt, ensure_ascii=False).encode()) // BYTES_PER_TOKEN


def _needs_answer(body: Mapping[str, Any]) -> bool:
    """Whether the decode node needs something of the prefill node's answer: log probabilities of the prompt."""
    return bool(body.get("echo")) or body.get("prompt_logprobs") is not None
