"""Which way a request goes: whether both nodes are asked at once.

This is decided in one table. `docs/router-design.md` has the same one. Pure: no clock, no socket.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ...connector.p2p.params import draw_offer_name, rendezvous_params

if TYPE_CHECKING:
    from ..nodes.pool import UpstreamNode

#: Requests at one prefill node at a time whose decode node was asked at once. More prompts would wait in a
#: queue there, and decode nodes would hold blocks meanwhile.
MAX_AT_ONCE = 8


class Way(enum.Enum):
    """When the decode node is asked."""

    IN_TURN = "in turn"
    AT_ONCE = "at once"


@dataclass(frozen=True)
class Options:
    """What the user has switched on.

    Attributes:
        rendezvous: Ask both nodes at once, if both can do that.
        continue_answers: Let another decode node go on with a streamed answer whose node is lost, where the
            result is provably that of a single node.
        max_at_once: Requests at one prefill node at a time whose decode node was asked at once.
    """

    rendezvous: bool = True
    continue_answers: bool = True
    max_at_once: int = MAX_AT_ONCE


@dataclass(frozen=True)
class Facts:
    """What decides.

    Attributes:
        may_ask_both: No attempt of this request has failed that way, and the client has no token yet.
        prefill, decode: The nodes that would be asked now. None: there is none, or it does not matter.
    """

    options: Options
    may_ask_both: bool = True
    prefill: UpstreamNode | None = None
    decode: UpstreamNode | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """The cache that a prefill node holds for a decode node, or a node that has stopped an answer for the one
    that goes on with it.

    Attributes:
        params: The `kv_transfer_params` of the prefill node's answer; in a rendezvous, those that the router
            made.
        name: Of the rendezvous; empty: it is none, and the prompt is computed.
    """

    node: UpstreamNode
    params: Mapping[str, Any]
    name: str = ""


class Row(NamedTuple):
    """A line of the table. The first one that holds decides."""

    when: str
    holds: Callable[[Facts], bool]
    way: Way


TABLE = (
    Row("`--rendezvous off`", lambda f: not f.options.rendezvous, Way.IN_TURN),
    Row("the client has tokens, or both were asked in vain", lambda f: not f.may_ask_both, Way.IN_TURN),
    Row(
        "the prefill node does not say where it can be reached",
        lambda f: _params("1" * 32, f.prefill) is None,
        Way.IN_TURN,
    ),
    Row(
        "the decode node does not say that it speaks kvferry's protocol",
        lambda f: f.decode is None or not f.decode.protocol,
        Way.IN_TURN,
    ),
    Row(
        "eight requests are at the prefill node in this way",
        lambda f: f.prefill is not None and f.prefill.num_at_once >= f.options.max_at_once,
        Way.IN_TURN,
    ),
    Row("otherwise", lambda f: True, Way.AT_ONCE),
)


def way_of(facts: Facts) -> Way:
    """Decide when the decode node is asked."""
    return next(row.way for row in TABLE if row.holds(facts))


def named_offer(facts: Facts) -> Offer | None:
    """Name the offer that a prefill node is to make, if the decode node is asked at once; otherwise None."""
    if facts.prefill is None or way_of(facts) is Way.IN_TURN:
        return None
    name = draw_offer_name()
    params = _params(name, facts.prefill)
    return None if params is None else Offer(facts.prefill, params, name)


def _params(name: str, prefill: UpstreamNode | None) -> dict[str, Any] | None:
    return None if prefill is None else rendezvous_params(name, prefill.place)
