"""The layer-wise store: what a step saves and what it waits for; `test_stores` has what it shares with the
other stores.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import layer_store
import pytest
import torch
from layer_store import LayerStoreWorker

from kvferry.connector.testing import ConnectorConformance, Request
from tests.support.patience import DEADLINE_S

from .stores import LAYER, answer, cut_short, flip_bits, store_node, transfer_of

node = partial(store_node, *LAYER)


class TestAsAnyConnector(ConnectorConformance):
    @pytest.fixture
    def transfer(self, tmp_path: Path) -> dict[str, Any]:
        return transfer_of(*LAYER, tmp_path)

    @pytest.fixture(params=[cut_short, flip_bits])
    def damage(self, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[], None]:
        return partial(request.param, tmp_path)


def num_files(folder: Path) -> int:
    return len(list(folder.iterdir()))


def test_each_step_saves_the_blocks_that_it_completes(tmp_path: Path) -> None:
    with node(tmp_path, max_step_tokens=6) as first:
        first.add(Request("a", 18), max_answer_tokens=4)
        saved = []
        while first.is_busy:
            first.step()
            saved.append(num_files(tmp_path))
        assert saved == [1, 3, 4, 4, 4, 4]  # after 6, 12 and 18 tokens of the prompt, and with its answer


def test_a_prompt_is_in_the_store_before_its_answer_is_out(tmp_path: Path) -> None:
    """So a decode node finds it whenever it asks."""
    with node(tmp_path) as first, node(tmp_path) as second:
        _, params = first.prefill("a", 18)
        assert params is None
        assert not first.held
        assert answer(second, Request("b", 18)) == 16


def test_two_requests_of_a_step_save_a_common_block_once(tmp_path: Path) -> None:
    with node(tmp_path) as first:
        first.add(Request("a", 18))
        first.add(Request("b", 18))
        first.step()
        assert num_files(tmp_path) == 4
        first.step_until(lambda: not first.is_busy)
        assert answer(first, Request("c", 18)) == 16


def test_what_a_step_computed_from_a_failed_load_is_not_saved(tmp_path: Path) -> None:
    with node(tmp_path) as first, node(tmp_path) as second:
        answer(first, Request("a", 18))
        for path in tmp_path.iterdir():
            path.write_bytes(path.read_bytes()[:-1])
        second.add(Request("b", 22))
        second.step()
        assert second.invalid_block_ids
        assert num_files(tmp_path) == 3  # the first damaged one is gone, and nothing new is there
        second.step_until(lambda: not second.is_busy)


@contextmanager
def held_up(monkeypatch: pytest.MonkeyPatch, last_layer: int) -> Iterator[threading.Event]:
    """Keep the thread from reading layers after `last_layer` inside the block.

    Setting what it yields lets it go on.
    """
    read, may_go_on = LayerStoreWorker._read, threading.Event()

    def wait(self: LayerStoreWorker, paths: Sequence[Path], layer: int) -> torch.Tensor:
        assert layer <= last_layer or may_go_on.wait(DEADLINE_S)
        return read(self, paths, layer)

    with monkeypatch.context() as patch:
        patch.setattr(LayerStoreWorker, "_read", wait)
        try:
            yield may_go_on
        finally:
            may_go_on.set()


def test_a_layer_waits_for_its_own_pages_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with node(tmp_path) as first:
        answer(first, Request("a", 18))
        save = first.worker.save_kv_layer
        with held_up(monkeypatch, last_layer=0) as may_go_on:

            def let_go_on(*arguments: Any) -> None:
                may_go_on.set()  # the first layer has been computed
                save(*arguments)

            monkeypatch.setattr(first.worker, "save_kv_layer", let_go_on)
            assert answer(first, Request("b", 18)) == 16
        (record,) = first.stats.transfers
        assert 0 < record.exposed_seconds <= record.seconds


def test_a_layer_waits_no_longer_than_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_store, "READ_TIMEOUT_S", 0.05)
    with node(tmp_path) as first:
        answer(first, Request("a", 18))
        with held_up(monkeypatch, last_layer=1):
            assert answer(first, Request("b", 18)) == 0
            assert first.failed_loads == {"b"}
        # What is read too late goes nowhere: the node checks that nothing was written into its blocks.
        for _ in range(5):
            first.step()
