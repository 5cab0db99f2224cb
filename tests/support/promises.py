"""Parts of the suite for transports: for options and kinds of memory that concern no more than these
promises.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.transports.testing import TransportConformance
from kvferry.transports.testing.peers import LoopPromises, MessagePromises, PeerPromises
from kvferry.transports.testing.reads import GuardPromises, MemoryPromises, OwnershipPromises, ReadPromises

#: What an option can break by itself, because it puts other code into the path: TLS or CURVE around the wire,
#: several connections or copiers, memory of a GPU.
#:
#: - Bytes arrive unchanged in every size and place, and many messages keep their order.
#: - Nothing is written after a read was cancelled, has timed out or lost its peer, or after a close.
#: - No bytes are delivered whose guard changed after the last of them.
#: - Reads end before their peer is lost. A stranger costs only its own connection. Closing ends everything
#:   once.
#:
#: The other promises are kept by code that no option touches: the peer table, the checks of arguments, and
#: the state machine of sliced reads, which `test_sliced` proves for every order and loss. `make test` asks
#: each transport for them once, and `make test ALL=1` with every option.
OF_AN_OPTION = {
    "test_bytes_arrive_unchanged",
    "test_scattered_regions_of_many_sizes",
    "test_a_read_larger_than_any_buffer",
    "test_many_reads_at_once",
    "test_many_messages_at_once_keep_their_order",
    "test_nonsense_costs_only_its_own_connection",
    "test_reads_end_before_their_peer_is_lost",
    "test_closing_twice_is_harmless_and_final",
    *(name for part in (OwnershipPromises, GuardPromises) for name in vars(part) if name.startswith("test_")),
} - {"test_an_impossible_guard_is_refused"}
#: Of the cases of these promises, an option is tested in those that reach furthest: reads that neither begin
#: nor end at a page, and reads that are stopped before their first step and halfway.
OF_SEVERAL_CASES: dict[str, set[object]] = {"local": {3}, "num_turns": {0, 4}}


def is_of_no_option(item: pytest.Item) -> bool:
    """Return whether a test of a suite marked `option` is about a promise or a case that no option
    touches.
    """
    if not isinstance(item, pytest.Function) or item.get_closest_marker("option") is None:
        return False
    if not hasattr(TransportConformance, item.originalname):
        return False
    case = item.callspec.params if hasattr(item, "callspec") else {}
    is_chosen = all(case[name] in chosen for name, chosen in OF_SEVERAL_CASES.items() if name in case)
    return item.originalname not in OF_AN_OPTION or not is_chosen


class OwnershipAndGuards(TransportConformance):
    """Who may use memory when, and what a guard promises. `test_sliced` proves the rest about reads."""

    connect_raw: Any = None
    read_unchecked: Any = None


for _part in (MemoryPromises, ReadPromises, MessagePromises, PeerPromises, LoopPromises):
    for _name in vars(_part):
        if _name.startswith("test_"):
            setattr(OwnershipAndGuards, _name, None)
