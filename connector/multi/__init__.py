"""Several connectors on one node, in order: the first that can serve a load does so, and all of them save."""

from __future__ import annotations

from .connector import ChildOptions, MultiConnector

__all__ = ["ChildOptions", "MultiConnector"]
