"""Attention: backends, their cache shapes, and the metadata of one step."""

from __future__ import annotations
