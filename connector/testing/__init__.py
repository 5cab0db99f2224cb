"""The suites that every connector passes, ours and yours, and nodes without a model to try it on.

    class TestMine(ConnectorConformance):
        @pytest.fixture
        def transfer(self, tmp_path):
            return {"kv_connector": "MyConnector", "kv_connector_extra_config": {"folder": str(tmp_path)}}

Each test of `ConnectorConformance` states a promise of `connector/base.py`; what a connector does not offer by its own
word (`prefer_cross_layer_blocks`) is skipped. `HandoffConformance` adds what the handoff protocol promises.
"""

from __future__ import annotations

from .faulty import FaultyConnector
from .harness import MakeNode, assert_whole, load
from .node import CacheShape, ModelFreeNode, Request, Step, engine_config
from .suite import ConnectorConformance, HandoffConformance

__all__ = [
    "CacheShape",
    "ConnectorConformance",
    "FaultyConnector",
    "HandoffConformance",
    "MakeNode",
    "ModelFreeNode",
    "Request",
    "Step",
    "assert_whole",
    "engine_config",
    "load",
]
