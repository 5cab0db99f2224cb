"""The conformance suite that every transport passes, and tools to test one.

    class TestMine(TransportConformance):
        @pytest.fixture
        def create(self):
            return MyTransport  # or any callable that takes the options

Each test states a promise of `transports/base.py`. A failure names the promise and what was seen. The suite
compares the memory itself and does not rely on what the transport says about it. It checks for leaks as well
(`leaks`). `docs/writing-a-transport.md` shows how to use it.
"""

from __future__ import annotations

from .harness import Link, Node, World, pairs_of
from .hostile import connect_tcp, read_without_checks
from .hostile_proxy import HostileProxy, NetworkFault
from .schemes import built_in
from .suite import TransportConformance

__all__ = [
    "HostileProxy",
    "Link",
    "NetworkFault",
    "Node",
    "TransportConformance",
    "World",
    "built_in",
    "connect_tcp",
    "pairs_of",
    "read_without_checks",
]
