"""Which bytes of one pool go where in another: pure, from two layouts and the blocks of a request.

`slots` and `layout` describe a pool, `compatibility` says whether two nodes can be paired at all, `plan` pairs pools that are
alike, `sources` and `reshard` those that are not.
"""

from __future__ import annotations
