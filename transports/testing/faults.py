"""What goes wrong on a `faulty` transport, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .. import errors
from .._options import parse_options, require_int
from ..errors import ConfigurationError, TransportError

__all__ = ["Fault", "FaultOptions", "Script"]

_KINDS = {"message": ("drop", "stall"), "transfer": ("drop", "stall", "fail", "corrupt")}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, once.

    Attributes:
        kind: `"drop"`: the connection to the peer breaks; a message is lost with it. `"stall"`: from here on nothing
            goes to the peer or comes from it, and transfers with it end at their deadlines. Of transfers only,
            `"fail"`: it ends with `error`, whatever it did; `"corrupt"`: other bytes arrive, which is noticed.
        at: `"message"`, of those sent and received by this node, or `"transfer"`, of those begun by it.
        nth: Which one, from 1.
        error: Name of a `TransportError` in `transports.errors`.

    Raises:
        ConfigurationError: there is no such fault.
    """

    kind: str
    at: str = "transfer"
    nth: int = 1
    error: str = "TransferTimeoutError"

    def __post_init__(self) -> None:
        if self.kind not in _KINDS.get(self.at, ()):
            raise ConfigurationError(f"no fault {self.kind!r} at a {self.at}", key="kind", value=self.kind)
        require_int("nth", self.nth, 1, 1 << 30)
        kind = getattr(errors, self.error, None)
        if not (isinstance(kind, type) and issubclass(kind, TransportError)):
            raise ConfigurationError(f"no transport error {self.error!r}", key="error", value=self.error)

    def make_error(self) -> TransportError:
        """The error that a failed transfer ends with."""
        error: TransportError = getattr(errors, self.error)("injected by a test")
        return error


@dataclass(frozen=True)
class FaultOptions:
    """Options of the transport.

    Attributes:
        inner: Scheme of the transport that does the work; `options` are its own.
        faults: `Fault`s, or mappings of their fields.
    """

    inner: str = "inproc"
    options: Mapping[str, object] = field(default_factory=dict)
    faults: Sequence[Fault | Mapping[str, object]] = ()


class Script:
    """The faults that have not happened yet, and how far a node has come."""

    def __init__(self, options: FaultOptions) -> None:
        self._left = [
            f if isinstance(f, Fault) else parse_options(Fault, f, "faulty") for f in options.faults
        ]
        self._counts = {"message": 0, "transfer": 0}

    def take(self, at: str) -> list[Fault]:
        """Count one more message or transfer, and return what happens to it."""
        self._counts[at] += 1
        due = [fault for fault in self._left if (fault.at, fault.nth) == (at, self._counts[at])]
        self._left = [fault for fault in self._left if fault not in due]
        return due
