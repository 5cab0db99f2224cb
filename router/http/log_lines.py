"""Log lines for people, of every process of the reference engine. It imports no HTTP server."""

from __future__ import annotations

import logging
from types import TracebackType

from ...transports.checked import printable

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class LineFormatter(logging.Formatter):
    """Formats a record as one line, and a traceback as indented lines after it.

    A message may quote a peer, a client or a server, so nothing in it moves a terminal's cursor or begins a
    line.

    Args:
        program: What each line names.
    """

    def __init__(self, program: str) -> None:
        super().__init__(f"%(asctime)s {program} %(levelname)s %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: _ExcInfo) -> str:
        return "\n".join(f"    {printable(line)}" for line in super().formatException(ei).split("\n"))
