"""The script of a `faulty` transport: which faults happen, and when."""

from __future__ import annotations

import builtins
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from .. import errors
from ..checked import integer
from ..errors import ConfigurationError, TransportError
from ..options import parse_options, require_valid

#: Calls of an endpoint, and of its guard table, that can be made to raise an undocumented exception.
CALLS = (
    "clear_guard",
    "close",
    "disconnect",
    "route_of",
    "send",
    "set_guard",
    "start_connect",
    "start_read",
    "wait_events",
    "wake",
)
_KINDS: Mapping[str, tuple[str, ...]] = {
    "message": ("drop", "stall"),
    "transfer": ("drop", "stall", "fail", "corrupt"),
    **dict.fromkeys(CALLS, ("raise", "raise_late")),
}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, once.

    Attributes:
        kind: What happens. At messages and transfers: `"drop"`: the connection to the peer breaks, and a
            message is lost with it. `"stall"`: from now on nothing goes to the peer or comes from it, and
            reads from it end at their deadlines. At transfers only: `"fail"`: the transfer ends with `error`.
            `"corrupt"`: wrong bytes arrive, and the transfer ends with a `ChecksumError`. At calls only:
            `"raise"`: the call raises `error` and does nothing. `"raise_late"`: it raises `error` after it
            did everything.
        at: `"message"`: a message that this node sends or receives. `"transfer"`: a read that it starts. Or
            one of `CALLS`.
        nth: Which message, transfer or call, from 1.
        error: Name of a `TransportError` in `transports.errors`; at a call, name of a builtin exception.

    Raises:
        ConfigurationError: there is no such fault.
    """

    kind: str
    at: str = "transfer"
    nth: Annotated[int, integer(1, 1 << 30)] = 1
    error: str = "TransferTimeoutError"

    def __post_init__(self) -> None:
        require_valid(self)
        if self.kind not in _KINDS.get(self.at, ()):
            raise ConfigurationError(
                f"unknown fault {self.kind!r} at {self.at!r}; known: {', '.join(_KINDS.get(self.at, ())) or 'none'}",
                key="kind",
                value=self.kind,
            )
        of_call = self.at in CALLS
        kind = getattr(builtins if of_call else errors, self.error, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception if of_call else TransportError)):
            raise ConfigurationError(
                f"unknown error {self.error!r}: expected the name of "
                f"{'a builtin exception' if of_call else 'a TransportError'}",
                key="error",
                value=self.error,
            )

    def make_error(self) -> TransportError:
        """Return the error that a failed transfer ends with."""
        error: TransportError = getattr(errors, self.error)("injected by a test")
        return error

    def make_exception(self) -> Exception:
        """Return the exception that a call raises."""
        exception: Exception = getattr(builtins, self.error)("injected by a test")
        return exception


@dataclass(frozen=True)
class FaultOptions:
    """Options of the transport.

    Attributes:
        inner: Scheme of the transport that does the work.
        options: Options of that transport.
        faults: `Fault` objects, or mappings of their fields.
    """

    inner: str = "inproc"
    options: Mapping[str, object] = field(default_factory=dict)
    faults: Sequence[Fault | Mapping[str, object]] = ()


class Script:
    """The faults that have not happened yet, and how many messages, transfers and calls a node has
    counted.
    """

    def __init__(self, options: FaultOptions) -> None:
        self._left: defaultdict[tuple[str, int], list[Fault]] = defaultdict(list)
        for f in options.faults:
            fault = f if isinstance(f, Fault) else parse_options(Fault, f, "faulty")
            self._left[fault.at, fault.nth].append(fault)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()  # any thread may call `wake`

    def take(self, at: str) -> list[Fault]:
        """Count one more message, transfer or call, and return the faults that happen to it."""
        with self._lock:
            self._counts[at] += 1
            return self._left.pop((at, self._counts[at]), [])
