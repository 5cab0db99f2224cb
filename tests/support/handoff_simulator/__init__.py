"""Support for tests of the handoff protocol: a simulated world, and one consumer in each state
(`load_states`).
"""

from __future__ import annotations

from ..explore import PromiseBroken
from .simulated import Spread
from .simulation import Simulation, explore, explore_without_faults

__all__ = ["PromiseBroken", "Simulation", "Spread", "explore", "explore_without_faults"]
