"""What tests of the handoff protocol drive: a simulated world, and one consumer, state by state (`stages`)."""

from __future__ import annotations

from .simulation import PUSH_GUARDS, PromiseBroken, Simulation, Spread, explore

__all__ = ["PUSH_GUARDS", "PromiseBroken", "Simulation", "Spread", "explore"]
