"""Lease numbers of offers are unique, and cannot be guessed from other ones."""

from __future__ import annotations

from itertools import pairwise

from kvferry.connector.handoff.messages import MAX_LEASE
from kvferry.connector.handoff.numbers import GuardNumbers

MANY = 50_000


def test_no_number_is_drawn_twice() -> None:
    numbers = GuardNumbers()
    drawn = [numbers.draw() for _ in range(MANY)]
    assert len(set(drawn)) == MANY
    assert min(drawn) >= 1
    assert max(drawn) < 1 << 62 <= MAX_LEASE


def test_a_number_does_not_reveal_the_next_one() -> None:
    """Numbers are spread over the whole range, and so are the distances from each to the next."""
    numbers = GuardNumbers()
    drawn = [numbers.draw() for _ in range(MANY)]
    distances = [(after - before) % (1 << 62) for before, after in pairwise(drawn)]
    for values in (drawn, distances):
        assert len({value >> 56 for value in values}) == 64
        assert len(set(values)) == len(values)
        ones = sum(value.bit_count() for value in values) / len(values)
        assert 30.5 < ones < 31.5


def test_two_nodes_draw_different_numbers() -> None:
    one, other = GuardNumbers(), GuardNumbers()
    assert not {one.draw() for _ in range(1000)} & {other.draw() for _ in range(1000)}
