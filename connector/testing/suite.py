"""All promises: one class for any connector, and one for connectors between nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from .failures import AbortPromises, FailurePromises
from .handoffs import DeliveryPromises, FigurePromises
from .harness import UNIFORM, MakeNode
from .node import CacheShape, ModelFreeNode, engine_config
from .promises import ConnectorPromises


class ConnectorConformance(ConnectorPromises):
    """The promises of any connector. A subclass overrides the fixture `transfer`."""

    @pytest.fixture
    def transfer(self) -> Mapping[str, Any]:
        """Return fields of `KVTransferConfig`: the connector's name and its options."""
        raise NotImplementedError("override the fixture `transfer`")

    @pytest.fixture
    def make_node(self, transfer: Mapping[str, Any]) -> Iterator[MakeNode]:
        """Return a function that makes a node; the nodes are shut down after the test.

        `options` are added to the connector's options; `fields` are passed to `engine_config`.
        """
        with ExitStack() as stack:

            def make(
                shape: CacheShape = UNIFORM, *, options: Mapping[str, Any] = {}, **fields: Any
            ) -> ModelFreeNode:
                common = dict(transfer)
                merged = {**common.pop("kv_connector_extra_config", {}), **options}
                config = engine_config(
                    common.pop("kv_connector"),
                    block_size=shape.block_size,
                    kv_connector_extra_config=merged,
                    **common,
                    **fields,
                )
                return stack.enter_context(ModelFreeNode(config, shape))

            yield make


class HandoffConformance(
    ConnectorConformance, DeliveryPromises, FigurePromises, FailurePromises, AbortPromises
):
    """The promises of a connector that uses the handoff protocol between nodes (`PeerToPeerConnector`)."""
