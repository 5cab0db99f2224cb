"""The layer-wise store keeps the connector contract: what a step saves, and what it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

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
