"""The engine's thread takes guards back at once, whatever the handoff thread waits for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvferry.connector.p2p.offer_guards import OfferGuards
from kvferry.connector.planning.extents import BlockExtents
from kvferry.connector.planning.layout import uniform_layout
from kvferry.transports.base import GuardTable
from kvferry.transports.regions import Extents

BLOCKS = BlockExtents(uniform_layout(["layer"], page_bytes=10, num_blocks=8, block_size=4, page_format="f"))


class Words(GuardTable):
    """The words themselves."""

    num_guards = 4

    def __init__(self) -> None:
        self.held = [0] * self.num_guards
        self.allowed: dict[int, Extents] = {}

    def set(self, index: int, value: int) -> None:
        self.held[index] = value

    def clear(self, index: int) -> None:
        self.held[index] = 0

    def allow(self, index: int, extents_of: Callable[[], Extents]) -> None:
        self.allowed[index] = extents_of()


def test_when_a_request_has_lost_its_blocks_its_guards_are_clear_and_no_others() -> None:
    words = Words()
    guards = OfferGuards(words, BLOCKS)
    for index, request_id in enumerate(("p", "other", "p")):
        assert guards.set(index, 7, request_id, number=1)
    guards.retract({"p"}, last=1)
    assert words.held == [0, 7, 0, 0]


def test_orders_from_before_set_no_guard_and_later_ones_do() -> None:
    words = Words()
    guards = OfferGuards(words, BLOCKS)
    guards.retract({"p"}, last=2)
    assert not guards.set(0, 7, "p", number=2)
    assert guards.set(1, 7, "other", number=2)
    assert guards.set(2, 8, "p", number=3)
    assert words.held == [0, 7, 8, 0]
    guards.carried_out(2)
    assert not guards.is_void("p", 2)  # forgotten, because none of these orders is left


def test_a_guard_is_for_the_blocks_of_its_offer() -> None:
    words = Words()
    guards = OfferGuards(words, BLOCKS)
    guards.allow(1, ((2, 3),))
    extents = words.allowed[1]
    assert extents.cover(np.array([20]), np.array([20]))
    assert not extents.cover(np.array([19]), np.array([2]))
    assert not extents.cover(np.array([39]), np.array([2]))
