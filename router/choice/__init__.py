"""The choice: which nodes get a request, by what they have to do and what they have cached."""

from __future__ import annotations
