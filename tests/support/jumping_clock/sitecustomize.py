"""Let the time of day jump by up to a day, back and forth, in each Python process that has this folder in
PYTHONPATH.
"""

from __future__ import annotations

import random
import time

_real, _real_ns, _drawn = time.time, time.time_ns, random.Random(1)


def _offset_s() -> float:
    return _drawn.choice((-86_400.0, -2.0, 0.0, 2.0, 86_400.0))


time.time = lambda: _real() + _offset_s()
time.time_ns = lambda: _real_ns() + int(_offset_s() * 1e9)
