"""Which bytes of one pool go where in another. Pure: the inputs are two layouts and the blocks of a request.

`slots` and `layout` describe a pool. `compatibility` decides whether two nodes can be paired at all. `plan`
pairs pools that are alike; `sources` and `reshard` pair pools that are not.
"""

from __future__ import annotations
