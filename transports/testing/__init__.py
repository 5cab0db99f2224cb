"""The conformance suite that every transport passes, and tools to test one.

    class TestMine(TransportConformance):
        @pytest.fixture
        def create(self):
            return MyTransport  # or any callable that takes the options

Each test states a promise of `transports/base.py`. The suite compares the memory itself and does not rely on what the
transport says about it. `docs/writing-a-transport.md` shows how to use it.
"""

from __future__ import annotations

from .harness import Link, Node, World, pairs_of
from .hostile_proxy import HostileProxy, NetworkFault
from .proxy import FlippingProxy
from .schemes import built_in
from .suite import TransportConformance

__all__ = [
    "FlippingProxy",
    "HostileProxy",
    "Link",
    "NetworkFault",
    "Node",
    "TransportConformance",
    "World",
    "built_in",
    "pairs_of",
]
