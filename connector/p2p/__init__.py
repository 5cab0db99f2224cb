"""The connector that carries caches from node to node.

Other connectors need nothing from here.

The scheduler half gives orders (`scheduler`, `orders`), the worker half passes them to the thread of `loop`,
which drives the protocol of `handoff/` and a transport, and `outcomes` reports each end to the engine once.
"""
