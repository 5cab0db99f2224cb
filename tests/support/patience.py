"""How long tests wait for what should happen soon, in proportion to how slow the machine is when they
start.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from typing import Final

#: Holds the figure of the process that measured it, for the processes that it starts.
_VARIABLE: Final = "KVFERRY_TEST_SLOWNESS"
#: What the work takes on a core of an ordinary server with nothing else to do.
_QUIET_S: Final = 0.12


def _measured() -> float:
    """Return how many times slower than on a quiet machine some work is, which shows slow and busy cores
    alike.
    """
    began = time.perf_counter()
    sum(number * number % 7 for number in range(2_000_000))
    return max(1.0, (time.perf_counter() - began) / _QUIET_S)


#: By how much limits in real seconds are longer than on a quiet machine.
SLOWNESS: Final = float(os.environ.setdefault(_VARIABLE, f"{_measured():.2f}"))
#: Seconds after which a test gives up waiting for what should have happened. Only a test that fails waits for
#: so long.
DEADLINE_S: Final = 45.0 * SLOWNESS


async def until(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    """Let the loop run until a condition holds.

    Raises:
        TimeoutError: it does not hold within `DEADLINE_S`.
    """
    async with asyncio.timeout(DEADLINE_S):
        while not (await found if inspect.isawaitable(found := holds()) else found):
            await asyncio.sleep(0.005)
