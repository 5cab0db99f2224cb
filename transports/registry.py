"""Finding a transport by its scheme. A transport is imported at its first use.

A third-party transport is an entry point in the group `kvferry.transports` whose name is the scheme, or a
program passes it to `register_transport`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Final, cast

from .base import Transport
from .errors import ConfigurationError
from .loading import load_class
from .options import unknown_key
from .outside import outside

ENTRY_POINT_GROUP: Final = "kvferry.transports"


@dataclass(frozen=True)
class BuiltIn:
    """A transport of this package.

    Attributes:
        target: `module:Class`; the module is relative to this package.
        package: The Python package that the transport needs; empty if it needs none.
        remedy: What to do if it cannot be loaded.
    """

    target: str
    package: str = ""
    remedy: str = "install what it needs"


#: The built-in transports by scheme. Connectors, their names and the tests derive from this table, which
#: works in a source tree that was never installed.
BUILT_IN: Final[Mapping[str, BuiltIn]] = MappingProxyType(
    {
        "auto": BuiltIn("auto:AutoTransport"),
        "inproc": BuiltIn("inproc:InProcTransport"),
        "nixl": BuiltIn(
            "nixl:NIXLTransport",
            package="nixl_cu12",
            remedy="`pip install '.[nixl]'` in the clone of kvferry",
        ),
        "shm": BuiltIn(
            "shm:SharedMemoryTransport", remedy="it needs Linux and Python's own `os.memfd_create`"
        ),
        "tcp": BuiltIn("tcp:TcpTransport", package="xxhash", remedy="`pip install xxhash`"),
        "ucx": BuiltIn(
            "ucx:UCXTransport", package="ucxx", remedy="`pip install '.[ucx]'` in the clone of kvferry"
        ),
        "zeromq": BuiltIn("zeromq:ZeroMQTransport", package="zmq", remedy="`pip install pyzmq xxhash`"),
    }
)

_registered: dict[str, str] = {}


def register_transport(scheme: str, target: str) -> None:
    """Make `scheme` stand for `target`, a `module:Class`, in this process. It is imported at its first use.

    Raises:
        ConfigurationError: the scheme stands for another class already, and still does.
    """
    known = available_transports().get(scheme, target)
    if known != target:
        raise ConfigurationError(
            f"transport {scheme!r} is registered already, as {known}", key=scheme, value=target
        )
    _registered[scheme] = target


def available_transports() -> Mapping[str, str]:
    """Return the schemes that `create_transport` knows, without importing anything.

    Returns:
        Read-only: scheme → `module:Class`. An entry point cannot replace a built-in transport.
    """
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)} | _registered
    found |= {scheme: f"{__package__}.{row.target}" for scheme, row in BUILT_IN.items()}
    return MappingProxyType(dict(sorted(found.items())))


def create_transport(scheme: str, options: Mapping[str, object]) -> Transport:
    """Create the transport named `scheme`.

    Args:
        scheme: A key of `available_transports()`.
        options: The transport's own options.

    Raises:
        ConfigurationError: see `load_transport`; or an option is unknown or has a bad value.
        BackendUnavailableError: see `load_transport`.
        BackpressureError: there are too few file descriptors.
    """
    create = cast(Callable[[Mapping[str, object]], Transport], load_transport(scheme))
    return create(options)


def check_options(scheme: str, options: Mapping[str, object]) -> None:
    """Refuse options that the transport named `scheme` would refuse, as far as this is known before it is
    created.

    Raises: as `create_transport` does.
    """
    load_transport(scheme).check_options(options)


def load_transport(scheme: str) -> type[Transport]:
    """Return the class of the transport named `scheme`; import it if necessary.

    Raises:
        ConfigurationError: the scheme is unknown, or its target is not a transport.
        BackendUnavailableError: the transport's module, or something that it imports, is not installed.
    """
    with outside("cannot look up the installed transports", ConfigurationError):
        known = available_transports()
    if scheme not in known:
        raise unknown_key(f"unknown transport {scheme!r}", scheme, known, key="transport", value=scheme)
    remedy = BUILT_IN[scheme].remedy if scheme in BUILT_IN else f"install what {known[scheme]} needs"
    return load_class(known[scheme], Transport, what=f"transport {scheme!r}", key="transport", remedy=remedy)
