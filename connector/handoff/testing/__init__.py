"""What tests of the handoff protocol drive: a simulated world, and one consumer, state by state (`stages`)."""

from __future__ import annotations

from .simulated import PUSH_GUARDS, PromiseBroken, Spread
from .simulation import Simulation, explore

__all__ = ["PUSH_GUARDS", "PromiseBroken", "Simulation", "Spread", "explore"]
