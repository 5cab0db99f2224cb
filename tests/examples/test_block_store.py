"""The block store's thread, its bounds and its eviction; `test_stores` has what it shares with the other
stores.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import block_store
import pytest
from block_store import BlockStoreWorker

from kvferry.connector import KVConnectorFactory
from kvferry.connector.testing import ConnectorConformance, Request, engine_config
from kvferry.transports.errors import ConfigurationError
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


def test_a_prompt_that_another_node_is_saving_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node(tmp_path) as first, node(tmp_path) as second:
        with held_up(monkeypatch, "_save"):
            _, params = first.prefill("a", 18)
            second.add(Request("b", 18, params))
            for _ in range(STEPS):
                second.step()
            assert not second.outputs  # it neither loads nor computes
        second.step_until(lambda: not second.is_busy, first)
        assert second.num_loaded_tokens == {"b": 16}
        first.step_until(lambda: not first.is_busy)


def test_it_is_not_waited_for_longer_than_a_deadline_nor_for_another_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node(tmp_path) as first, node(tmp_path / "elsewhere") as second:
        _, params = first.prefill("a", 18)
        other = Request("b", 22, params)
        second.scheduler.on_new_request(other)
        assert second.scheduler.get_num_new_matched_tokens(other, 0) == (0, False)
        monkeypatch.setattr(block_store, "WAIT_S", 0.05)
        assert answer(second, Request("c", 18, params)) == 0
        first.step_until(lambda: not first.is_busy)


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


def test_a_load_does_not_wait_for_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with node(tmp_path) as first:
        answer(first, Request("a", 18))
        with held_up(monkeypatch, "_save") as saves:
            first.prefill("b", 5)
            first.step()
            assert saves.wait(DEADLINE_S)
            first.add(Request("c", 18))
            first.step_until(lambda: not first.is_running("c"))
            assert first.num_loaded_tokens["c"] == 16
            assert "b" in first.held
        first.step_until(lambda: not first.is_busy)


def test_a_store_that_cannot_keep_up_does_not_hold_more_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_store, "MAX_SAVES", 2)
    with node(tmp_path) as first:
        with held_up(monkeypatch, "_save"):
            for name in "abcd":
                first.prefill(name, 5)
            first.step()
            assert set(first.held) == {"a", "b"}
            assert first.params["b"]
            assert first.params["c"] is None
        first.step_until(lambda: not first.held)
        first.prefill("e", 5)
        assert set(first.held) == {"e"}
        first.step_until(lambda: not first.held)


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


def test_a_prompt_loses_its_last_blocks_first(tmp_path: Path) -> None:
    """The later blocks are of no use without the earlier ones."""
    with node(tmp_path, capacity_gb=room_for(6)) as first:
        answer(first, Request("a", 17))
        answer(first, Request("b", 17, first_token_id=100))
        with store_node(*BLOCK, tmp_path, capacity_gb=1) as second:
            assert answer(second, Request("c", 17)) == 8


def test_a_prompt_larger_than_the_store_keeps_its_first_blocks(tmp_path: Path) -> None:
    capacity = {"capacity_gb": room_for(3)}
    with node(tmp_path, **capacity) as first, node(tmp_path, **capacity) as second:
        _, params = first.prefill("a", 30)
        second.add(Request("b", 30, params))
        second.step_until(lambda: not second.is_busy, first)
        assert second.num_loaded_tokens == {"b": 12}
        first.step_until(lambda: not first.is_busy)
    assert len(list(tmp_path.iterdir())) == 3


def test_eviction_deletes_leftovers_but_no_file_of_others(tmp_path: Path) -> None:
    (tmp_path / "diary.txt").write_bytes(b"x" * 10 * FILE_BYTES)
    leftover = tmp_path / f"{'0' * 64}{block_store.SUFFIX}-0123"
    leftover.write_bytes(b"x" * FILE_BYTES)
    with node(tmp_path, capacity_gb=room_for(4)) as first:
        answer(first, Request("a", 17))
        assert answer(first, Request("b", 17)) == 16
    assert (tmp_path / "diary.txt").exists()
    assert not leftover.exists()


def test_shutting_down_ends_what_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with node(tmp_path) as first:
        monkeypatch.setattr(BlockStoreWorker, "_make_room", lambda self, _: self._is_closing.wait(DEADLINE_S))
        first.prefill("a", 18)
        first.step()
    assert not list(tmp_path.iterdir())


def test_a_thread_that_hangs_delays_the_end_by_no_more_than_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(block_store, "SHUTDOWN_S", 0.05)
    with held_up(monkeypatch, "_save") as saves:
        with node(tmp_path) as first, caplog.at_level(logging.WARNING):
            first.prefill("a", 18)
            first.step()
            assert saves.wait(DEADLINE_S)
            (thread,) = (thread for thread in threading.enumerate() if thread.name == "block-store-save")
        assert "hangs in" in caplog.text
    thread.join(DEADLINE_S)


def test_whatever_a_job_raises_the_thread_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with node(tmp_path) as first:
        with monkeypatch.context() as patch:
            patch.setattr(block_store, "touch", lambda copies: 1 // 0)
            answer(first, Request("a", 18))
            assert "cannot save 4 blocks" in first.worker.warning
        answer(first, Request("a2", 18))
        assert first.worker.warning == ""
        with monkeypatch.context() as patch:
            patch.setattr(block_store, "touch", lambda copies: 1 // 0)
            assert answer(first, Request("b", 18)) == 0
        assert "by zero" in first.load_error("b")


@pytest.mark.parametrize("capacity", [0, -1, "much", float("nan")])
def test_a_capacity_that_cannot_be_is_refused_before_the_model_is_loaded(
    capacity: object, tmp_path: Path
) -> None:
    transfer = transfer_of(*BLOCK, tmp_path, capacity_gb=capacity)
    config = engine_config(transfer.pop("kv_connector"), **transfer)
    assert config.kv_transfer is not None
    with pytest.raises(ConfigurationError, match="capacity_gb must be a positive number of GB"):
        KVConnectorFactory.check_options(config.kv_transfer)
