"""KV cache management: block hashes, free queue, block pool, groups and memory checks."""

from __future__ import annotations
