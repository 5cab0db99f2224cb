"""The answer: what is asked of which node, and what the client gets, also if nodes are lost meanwhile."""

from __future__ import annotations
