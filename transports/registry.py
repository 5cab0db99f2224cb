"""From a scheme to a transport. Nothing is imported before it is asked for.

A third party's transport is an entry point in the group `kvferry.transports`, named by its scheme; or a program names
it in `register_transport`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import MappingProxyType

from ._options import unknown_key
from ._outside import outside
from .base import Transport
from .errors import BackendUnavailableError, ConfigurationError

ENTRY_POINT_GROUP = "kvferry.transports"

#: Scheme: (module relative to this package, class). Works from a source tree that was never installed.
_BUILT_IN = {
    "auto": (".auto", "AutoTransport"),
    "inproc": (".inproc", "InProcTransport"),
    "shm": (".shm", "SharedMemoryTransport"),
    "ucx": (".ucx", "UCXTransport"),
    "zeromq": (".zeromq", "ZeroMQTransport"),
}

_INSTALL_HINTS = {
    "shm": "it needs Linux and Python's own `os.memfd_create`",
    "ucx": "`pip install 'kvferry[ucx]'`",
    "zeromq": "`pip install pyzmq xxhash`",
}


_registered: dict[str, str] = {}


def register_transport(scheme: str, target: str) -> None:
    """Let `scheme` stand for `target`, a `module:Class`, in this process. It is imported when it is first asked for.

    Raises:
        ConfigurationError: the scheme stands for something else already. It still does.
    """
    known = available_transports().get(scheme, target)
    if known != target:
        raise ConfigurationError(f"transport {scheme!r} is {known} already", key=scheme, value=target)
    _registered[scheme] = target


def available_transports() -> Mapping[str, str]:
    """List what `create_transport` can be asked for, without importing it.

    Returns:
        Read-only: scheme to `module:Class`. A built-in cannot be replaced by an entry point of the same name.
    """
    found = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)} | _registered
    found |= {scheme: f"{__package__}{module}:{name}" for scheme, (module, name) in _BUILT_IN.items()}
    return MappingProxyType(dict(sorted(found.items())))


def create_transport(scheme: str, options: Mapping[str, object]) -> Transport:
    """Create the transport named `scheme`.

    Args:
        scheme: A key of `available_transports()`.
        options: The transport's own options.

    Raises:
        ConfigurationError: no such scheme; what it names is not a transport; or an option is unknown or wrong.
        BackendUnavailableError: the transport's module, or something that it imports, is not installed.
        BackpressureError: there are too few file descriptors.
    """
    transport = _named(scheme)(options)
    if not isinstance(transport, Transport):
        raise ConfigurationError(
            f"{available_transports()[scheme]} is not a Transport", key="transport", value=scheme
        )
    return transport


def check_options(scheme: str, options: Mapping[str, object]) -> None:
    """Refuse options that the transport named `scheme` would refuse, as far as it can tell before it is created.

    Raises:
        ConfigurationError: no such scheme, or an option is unknown or wrong.
        BackendUnavailableError: the transport's module, or something that it imports, is not installed.
    """
    found = _named(scheme)
    if isinstance(found, type) and issubclass(found, Transport):
        found.check_options(options)


def _named(scheme: str) -> Callable[[Mapping[str, object]], object]:
    with outside("cannot look up the installed transports", ConfigurationError):
        known = available_transports()
    if scheme not in known:
        raise unknown_key(f"unknown transport {scheme!r}", scheme, known, key="transport", value=scheme)
    return _load(scheme, known[scheme])


def _load(scheme: str, target: str) -> Callable[[Mapping[str, object]], object]:
    module_name, _, class_name = target.partition(":")
    try:
        loaded: Callable[[Mapping[str, object]], object] = getattr(
            importlib.import_module(module_name), class_name
        )
    except (ImportError, AttributeError) as error:
        hint = _INSTALL_HINTS.get(scheme, f"install what {module_name} needs")
        raise BackendUnavailableError(f"transport {scheme!r} cannot be loaded: {error}; {hint}") from error
    return loaded
