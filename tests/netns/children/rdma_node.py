"""`node.py` on a host that seems to have RDMA when the node starts.

The other host cannot be reached by RDMA.
"""

from __future__ import annotations

import node

from kvferry.transports.ucx import transport

if __name__ == "__main__":
    # The only stand-in: the network that UCX would find on such a host.
    transport.require_network = lambda _: "ucx:rc_mlx5"
    node.main()
