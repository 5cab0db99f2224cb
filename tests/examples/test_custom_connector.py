"""The simplest store waits for a save, and no longer than that; `test_stores` has what it shares with the
other stores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector.testing import ConnectorConformance, Request

from .stores import FILE, SHAPE, answer, cut_short, store_node, transfer_of

node = partial(store_node, *FILE)


class TestAsAnyConnector(ConnectorConformance):
    @pytest.fixture
    def transfer(self, tmp_path: Path) -> dict[str, Any]:
        return transfer_of(*FILE, tmp_path)

    @pytest.fixture
    def damage(self, tmp_path: Path) -> Callable[[], None]:
        return partial(cut_short, tmp_path)


def test_a_prompt_is_loaded_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    with node(tmp_path) as first:
        answer(first, Request("a", 18))
        assert answer(first, Request("b", 22)) == 0
        assert answer(first, Request("c", 18)) == 16


def test_a_prompt_that_another_node_is_saving_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node(tmp_path) as first, node(tmp_path) as second:
        _, params = first.prefill("a", 18)
        second.add(Request("b", 18, params))
        second.step()
        assert second.is_running("b")
        first.step()
        second.step()
        assert second.num_loaded_tokens == {"b": 16}


def test_it_is_not_waited_for_longer_than_a_deadline_nor_for_another_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with node(tmp_path) as first, node(tmp_path) as second:
        _, params = first.prefill("a", 18)
        other = Request("b", 22, params)
        second.scheduler.on_new_request(other)
        assert second.scheduler.get_num_new_matched_tokens(other, 0) == (0, False)
        monkeypatch.setattr("custom_connector.WAIT_S", 0.05)
        assert answer(second, Request("c", 18, params)) == 0
        first.step()
        second.step()


def test_all_of_a_synchronous_load_is_exposed(tmp_path: Path) -> None:
    with node(tmp_path) as first:
        answer(first, Request("a", 18))
        answer(first, Request("b", 18))
        (record,) = first.stats.transfers
        assert record.mechanism == "safetensors"
        assert record.exposed_seconds == record.seconds > 0
        assert record.num_bytes == 4 * SHAPE.num_layers * SHAPE.spec.page_size_bytes
