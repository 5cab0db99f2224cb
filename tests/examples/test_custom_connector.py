"""The simplest store keeps the connector contract, and waits for a save."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector.testing import ConnectorConformance, Request

from .stores import FILE, answer, cut_short, store_node, transfer_of

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
