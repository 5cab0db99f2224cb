"""The conformance suite passes correct stores of each kind, and reports the broken promise of each planted bug."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector.testing import ConnectorConformance


class StoreConformance(ConnectorConformance):
    """The suite as an author runs it, with a way to damage the store."""

    connector = ""

    @pytest.fixture
    def transfer(self, tmp_path: Path) -> dict[str, Any]:
        return {
            "kv_connector": self.connector,
            "kv_connector_module_path": "tests.support.stores",
            "kv_connector_extra_config": {"folder": str(tmp_path)},
        }

    @pytest.fixture
    def damage(self, tmp_path: Path) -> Callable[[], None]:
        def cut_short() -> None:
            for path in tmp_path.iterdir():
                path.write_bytes(path.read_bytes()[:-8])

        return cut_short


class TestWholePrompts(StoreConformance):
    connector = "WholePrompts"


class TestAsyncBlocks(StoreConformance):
    connector = "AsyncBlocks"


class TestLayers(StoreConformance):
    connector = "Layers"
