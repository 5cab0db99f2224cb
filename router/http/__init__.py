"""What the router and the reference node share as HTTP servers: access, limits, errors, logs, traces, start
and end.
"""

from __future__ import annotations
