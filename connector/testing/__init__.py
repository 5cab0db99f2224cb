"""The suites that every connector passes, ours and yours, and nodes without a model on which to run it.

    class TestMine(ConnectorConformance):
        @pytest.fixture
        def transfer(self, tmp_path):
            return {"kv_connector": "MyConnector", "kv_connector_extra_config": {"folder": str(tmp_path)}}

Each test of `ConnectorConformance` states a promise of `connector/base.py`. A test of something optional is skipped if the
connector does not offer it, as the uniform layout by `prefer_cross_layer_blocks`. `HandoffConformance` adds the promises of
the handoff protocol.
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
