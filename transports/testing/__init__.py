"""The suite that every transport passes, ours and yours.

    class TestMine(TransportConformance):
        @pytest.fixture
        def create(self):
            return MyTransport  # or any callable that takes the options

Each test states a promise of `transports/base.py`. The suite looks into the memory itself and never asks the
transport what it did.
"""

from __future__ import annotations

from .harness import Link, Node, World, pairs_of
from .hostile_proxy import HostileProxy, Mishap
from .proxy import FlippingProxy
from .schemes import built_in
from .suite import TransportConformance

__all__ = [
    "FlippingProxy",
    "HostileProxy",
    "Link",
    "Mishap",
    "Node",
    "TransportConformance",
    "World",
    "built_in",
    "pairs_of",
]
