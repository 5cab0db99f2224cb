"""The suites that every connector passes, ours and yours, and nodes without a model on which to run it.

    class TestMine(ConnectorConformance):
        @pytest.fixture
        def transfer(self, tmp_path):
            return {"kv_connector": "MyConnector", "kv_connector_extra_config": {"folder": str(tmp_path)}}

Each test of `ConnectorConformance` states a promise of `docs/connector-contract.md`. A test of something
optional is skipped if the connector does not declare it, and the skip names what was not declared: the
uniform layout with `prefer_cross_layer_blocks`, damaged stores with the fixture `damage`.
`HandoffConformance` adds the promises of the handoff protocol.

A test that fails raises `BrokenPromiseError`, which says what was promised and what was seen instead.
"""

from __future__ import annotations

from .. import pytorch

if not pytorch.IS_INSTALLED:
    raise pytorch.missing(__name__)

from .broken import BrokenPromiseError
from .faulty import FaultyConnector
from .harness import PER_LAYER, UNIFORM, MakeNode, assert_whole, compute, fetch, load, node_maker, settle
from .node import ModelFreeNode
from .shapes import CacheShape, Request, Step, engine_config
from .suite import ConnectorConformance, HandoffConformance

__all__ = [
    "PER_LAYER",
    "UNIFORM",
    "BrokenPromiseError",
    "CacheShape",
    "ConnectorConformance",
    "FaultyConnector",
    "HandoffConformance",
    "MakeNode",
    "ModelFreeNode",
    "Request",
    "Step",
    "assert_whole",
    "compute",
    "engine_config",
    "fetch",
    "load",
    "node_maker",
    "settle",
]
