"""Logs of nodes and routers: lines of text for people, or JSON objects for collectors.

Inside vLLM, vLLM's own logging is used instead.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from typing import Final, Literal

from . import serving
from .log_lines import LineFormatter
from .tracing import current_span, request_id_in_logs

LogFormat = Literal["text", "json"]
#: Seconds between two lines of one kind from OpenTelemetry's SDK.
_SDK_INTERVAL_S: Final = 60.0
#: Environment variable that tells an engine's worker processes which format to use.
FORMAT_OF_WORKERS: Final = "KVFERRY_LOG_FORMAT"


def set_up_logging(level: str, name: str, log_format: LogFormat = "text") -> None:
    """Log to stderr. Each line contains the program's `name`."""
    handler = logging.StreamHandler()
    if log_format == "json":
        formatter = JsonFormatter(name)
        handler.setFormatter(formatter)
        serving.form_of_lines = formatter.line
    else:
        handler.setFormatter(LineFormatter(name))
    handler.addFilter(_SdkFilter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    os.environ[FORMAT_OF_WORKERS] = log_format


class _SdkFilter(logging.Filter):
    """Limits what OpenTelemetry's SDK logs while no collector answers: a line per minute and kind, without
    tracebacks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("opentelemetry."):
            return True
        record.exc_info = record.exc_text = None
        kind = record.name, record.levelno
        is_due = record.created > self._latest.get(kind, 0.0) + _SDK_INTERVAL_S
        if is_due:
            self._latest[kind] = record.created
        return is_due


class JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object on one line.

    Its keys are `time` (RFC 3339, UTC), `level`, `program`, `logger` and `message`; `request_id` and
    `trace_id` if the record is about a request, or was made while one was answered; and `exception`, a
    traceback.
    """

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def line(self, text: str, is_error: bool) -> str:
        """Format a line that the program prints itself."""
        level = logging.ERROR if is_error else logging.INFO
        return self.format(logging.LogRecord(__name__, level, "", 0, text, (), None))

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": at.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "program": self._program,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", "") or request_id_in_logs.get(),
            "trace_id": current_span().trace_id,
            "exception": self.formatException(record.exc_info) if record.exc_info else "",
        }
        return json.dumps({key: value for key, value in line.items() if value})
