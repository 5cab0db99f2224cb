"""All promises, in a class for any connector and one for connectors between nodes."""

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
    """What any connector owes. A backend overrides `transfer`."""

    @pytest.fixture
    def transfer(self) -> Mapping[str, Any]:
        """Fields of `KVTransferConfig` that name the connector, and its options."""
        raise NotImplementedError("override the fixture `transfer`")

    @pytest.fixture
    def make_node(self, transfer: Mapping[str, Any]) -> Iterator[MakeNode]:
        """Makes nodes of a shape, which are shut down after the test.

        `options` are added to the connector's; `fields` go to `engine_config`.
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
    """What a connector owes that carries caches between nodes by the handoff protocol (`PeerToPeerConnector`)."""
