"""The block store keeps the connector contract, and its own bounds."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import block_store
import pytest
from block_store import BlockStoreWorker

from kvferry.connector.testing import ConnectorConformance, Request
from tests.support.patience import DEADLINE_S

from .stores import BLOCK, SHAPE, answer, cut_short, flip_bits, prompt, store_node, transfer_of

FILE_BYTES = SHAPE.num_layers * SHAPE.spec.page_size_bytes + block_store.CHECKSUM_BYTES
STEPS = 5

node = partial(store_node, *BLOCK)


class TestAsAnyConnector(ConnectorConformance):
    @pytest.fixture
    def transfer(self, tmp_path: Path) -> dict[str, Any]:
        return transfer_of(*BLOCK, tmp_path)

    @pytest.fixture(params=[cut_short, flip_bits])
    def damage(self, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], None]:
        return partial(request.param, tmp_path)


def room_for(num_blocks: int) -> float:
    """Return the capacity for that many blocks."""
    return num_blocks * FILE_BYTES / 1e9


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch, method: str) -> Iterator[threading.Event]:
    """Keep every thread from beginning a method of the worker half.

    Yields what is set as soon as one waits there.
    """
    may_go_on, waits = threading.Event(), threading.Event()
    original = getattr(BlockStoreWorker, method)

    def wait(self: BlockStoreWorker, *arguments: Any) -> None:
        waits.set()
        assert may_go_on.wait(DEADLINE_S)
        original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(BlockStoreWorker, method, wait)
        try:
            yield waits
        finally:
            may_go_on.set()


def test_blocks_of_an_aborted_load_are_held_until_the_thread_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node(tmp_path) as first:
        answer(first, Request("a", 18))
        with held_up(monkeypatch, "_load") as loads:
            first.add(Request("b", 18))
            first.step()
            assert loads.wait(DEADLINE_S)
            first.finish("b")
            for _ in range(STEPS):
                first.step()
            assert first.is_busy
            assert first.num_reports("b", "recving") == 0
        first.step_until(lambda: not first.is_busy)
        assert first.num_reports("b", "recving") == 1
        assert first.num_reports("b", "sending") == 0
        assert sorted(first.pool.free_blocks) == list(range(1, SHAPE.num_blocks))


def test_what_was_not_used_for_the_longest_time_is_deleted(tmp_path: Path) -> None:
    with node(tmp_path, capacity_gb=room_for(8)) as first:
        a, b, c = (prompt((1000 * index, 17)) for index in range(3))
        ids = itertools.count()

        def loads(tokens: Any) -> int:
            return answer(first, Request(f"r{next(ids)}", 17, token_ids=tokens))

        assert (loads(a), loads(b)) == (0, 0)
        assert loads(a) == 16  # so that it was used later than `b`
        assert loads(c) == 0
        assert len(list(tmp_path.iterdir())) == 8
        assert (loads(a), loads(c)) == (16, 16)
        assert loads(b) == 0
