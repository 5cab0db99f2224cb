"""The handoff protocol as pure state machines: events and a clock in, actions out."""

from __future__ import annotations
