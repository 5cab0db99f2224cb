"""The nodes: which there are, how each of them is, and what they answer."""

from __future__ import annotations
