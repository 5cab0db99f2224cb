"""`node.py` on a host with RDMA, as far as its start can tell; no RDMA leads to the other host."""

from __future__ import annotations

import node

from kvferry.transports.ucx import transport

if __name__ == "__main__":
    transport.require_network = lambda _: (
        "ucx:rc_mlx5"
    )  # what UCX would find there; nothing else is stood in for
    node.main()
