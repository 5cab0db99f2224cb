"""All promises: one class for any connector, and one for connectors between nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest

from ...transports.testing.leaks import LeavesNothingBehind
from .aborts import RequestsThatEndEarly
from .failures import AbortPromises, FailurePromises
from .handoffs import DeliveryPromises, FigurePromises, RendezvousPromises
from .harness import MakeNode, node_maker
from .loads import LoadPromises
from .promises import ConnectorPromises


class ConnectorConformance(LoadPromises, RequestsThatEndEarly, ConnectorPromises, LeavesNothingBehind):
    """The promises of any connector. A subclass overrides the fixture `transfer`, and may override `damage`.

    Attributes:
        deadline_s: How long a test waits for what must happen in the end. It matters only if a promise is
            broken.
    """

    deadline_s: ClassVar[float] = 20.0

    @pytest.fixture
    def transfer(self) -> Mapping[str, Any]:
        """Return fields of `KVTransferConfig`: the connector's name and its options."""
        raise NotImplementedError("override the fixture `transfer`")

    @pytest.fixture
    def damage(self) -> Callable[[], None]:
        """Return a function that damages or removes everything that the connector has stored so far.

        For example, it cuts each file of a folder short. Without it the tests of damaged stores are skipped.
        """
        pytest.skip(
            "the capability to damage the store was not declared: to test what a damaged entry does, override the fixture "
            "`damage`, which returns a function that damages or removes all stored entries"
        )

    @pytest.fixture(autouse=True)
    def damage_is_there(self, request: pytest.FixtureRequest) -> None:
        """Skip a test that damages the store if the fixture `damage` returns None."""
        if "damage" in request.fixturenames and request.getfixturevalue("damage") is None:
            pytest.skip(f"{type(self).__name__}: this test needs `damage`, and the fixture returned None")

    @pytest.fixture
    def make_node(self, transfer: Mapping[str, Any]) -> Iterator[MakeNode]:
        """Return a function that makes a node; the nodes are shut down after the test. See `node_maker`."""
        with node_maker(transfer, self.deadline_s) as make:
            yield make


class HandoffConformance(
    ConnectorConformance, DeliveryPromises, RendezvousPromises, FigurePromises, FailurePromises, AbortPromises
):
    """The promises of a connector that uses the handoff protocol between nodes (`PeerToPeerConnector`)."""
