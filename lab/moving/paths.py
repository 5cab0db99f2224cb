"""The paths that `kvferry doctor` and `kvferry bench` try.

The command line names them, so importing it is cheap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Literal


@dataclass(frozen=True)
class Path:
    """A transport with options.

    Attributes:
        options: Options of the transport, at both ends.
        memory: Where the pool is: in memory that the transport allocates, in ordinary memory, or on the first
            GPU.
    """

    name: str
    scheme: str
    options: Mapping[str, object] = field(default_factory=dict)
    memory: Literal["arena", "ordinary", "gpu"] = "arena"


#: A reader does not look after its connection while it copies or checks; on a busy machine that takes a
#: while.
_PLAINTEXT: Final[Mapping[str, object]] = {"allow_plaintext": True, "peer_timeout_s": 30}
_TCP_PLAINTEXT: Final[Mapping[str, object]] = {**_PLAINTEXT, "tls": "off"}

#: The paths that are tried, by name. They are not encrypted: what they serve is a pattern of numbers.
PATHS: Final[Mapping[str, Path]] = MappingProxyType(
    {
        path.name: path
        for path in (
            Path("shm", "shm"),
            Path("shm-foreign", "shm", memory="ordinary"),
            Path("shm-gpu", "shm", memory="gpu"),
            Path("tcp", "tcp", _TCP_PLAINTEXT),
            Path("zeromq", "zeromq", {**_PLAINTEXT, "curve": "off"}),
            Path("auto", "auto", {"network": "tcp", "network_options": _TCP_PLAINTEXT}),
            Path("ucx", "ucx", _PLAINTEXT),
            Path("nixl", "nixl", _PLAINTEXT),
        )
    }
)


def path_of(name: str, options: Mapping[str, object] | None = None) -> Path:
    """Return a path of `PATHS`, with the user's own options of its transport if there are any.

    Raises:
        KeyError: there is none of that name.
    """
    path = PATHS[name]
    return path if options is None else replace(path, options=dict(options))


def towards(path: Path, address: str) -> Path:
    """Return the path with the network transports of an `auto` address, since both sides must have the same.

    Raises:
        ConfigurationError: the address is of `auto`, and malformed.
    """
    from kvferry.transports.auto.address import AutoAddress

    if path.scheme != "auto":
        return path
    names = [network.partition(":")[0] for network in AutoAddress.parse(address).networks]
    options: dict[str, object] = {name: PATHS[name].options for name in names if name in PATHS}
    if len(names) == 1:
        options = {"network_options": options[names[0]]} if options else {}
    else:
        options = {"network_options": options}
    return replace(path, options={"network": ",".join(names), **options})


def at_host(path: Path, host: str, port_range: str = "") -> Path:
    """Return the path with a listener at `host`, an IP address of this machine, and on one of some ports."""
    if path.scheme == "shm":
        return path
    where = {"bind_host": host, **({"port_range": port_range} if port_range else {})}
    if path.scheme == "auto":
        inner = path.options.get("network_options", {})
        if not isinstance(inner, Mapping):
            return path  # the transport refuses it, and says why
        return replace(path, options={**path.options, "network_options": {**where, **inner}})
    return replace(path, options={**where, **path.options})
