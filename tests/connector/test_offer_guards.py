"""The engine's thread takes guards back at once, whatever the handoff thread waits for."""

from __future__ import annotations

from kvferry.connector.p2p.offer_guards import OfferGuards
from kvferry.transports.base import GuardTable


class Words(GuardTable):
    """The words themselves."""

    num_guards = 4

    def __init__(self) -> None:
        self.held = [0] * self.num_guards

    def set(self, index: int, value: int) -> None:
        self.held[index] = value

    def clear(self, index: int) -> None:
        self.held[index] = 0


def test_when_a_request_has_lost_its_blocks_its_guards_are_clear_and_no_others() -> None:
    words = Words()
    guards = OfferGuards(words)
    for index, request_id in enumerate(("p", "other", "p")):
        assert guards.set(index, 7, request_id, number=1)
    guards.retract({"p"}, last=1)
    assert words.held == [0, 7, 0, 0]


def test_orders_from_before_set_no_guard_and_later_ones_do() -> None:
    words = Words()
    guards = OfferGuards(words)
    guards.retract({"p"}, last=2)
    assert not guards.set(0, 7, "p", number=2)
    assert guards.set(1, 7, "other", number=2)
    assert guards.set(2, 8, "p", number=3)
    assert words.held == [0, 7, 8, 0]
    guards.carried_out(2)
    assert not guards.is_void("p", 2)  # forgotten, because none of these orders is left
