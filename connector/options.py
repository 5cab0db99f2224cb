"""The options of a peer-to-peer connector: what stands in `kv_connector_extra_config`, parsed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from ..transports._options import unknown_key
from ..transports.errors import ConfigurationError
from .handoff.config import HandoffConfig

_TIMING_KEYS = tuple(setting.name for setting in fields(HandoffConfig))


@dataclass(frozen=True)
class ConnectorOptions:
    """Options of a connector that reads a peer's pool.

    Attributes:
        cross_layer_blocks: Ask for the uniform layout: one block of all layers is one run of bytes.
        address: Where to listen, in the transport's own form; empty lets the transport choose.
        transport: The transport's own options; it refuses those that it does not know.
        handoff: Deadlines and bounds; a user writes each beside the others, e.g. `{"lease_s": 10}`.
    """

    cross_layer_blocks: bool = True
    address: str = ""
    transport: Mapping[str, object] = field(default_factory=dict)
    handoff: HandoffConfig = field(default_factory=HandoffConfig)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Parse what a user wrote.

        Raises:
            ConfigurationError: a key is unknown, or has a value that is not allowed; the error names it.
        """
        require_known(mapping)
        own = {key: _checked(key, mapping[key]) for key in _TYPES if key in mapping}
        timing = {key: mapping[key] for key in _TIMING_KEYS if key in mapping}
        return cls(**own, handoff=HandoffConfig(**timing))


def require_known(mapping: Mapping[str, Any], *more: str) -> None:
    """Refuse keys that are neither options of a connector nor in `more`.

    Raises:
        ConfigurationError: there is one; the error names it, and the known one that looks most like it.
    """
    known = (*_TYPES, *_TIMING_KEYS, *more)
    for key in mapping:
        if key not in known:
            what = f"unknown connector option {key!r}"
            raise unknown_key(what, str(key), known, key=str(key), value=mapping[key])


#: The options that are not deadlines: their type, and its name in words.
_TYPES: Mapping[str, tuple[type, str]] = {
    "cross_layer_blocks": (bool, "true or false"),
    "address": (str, "a string"),
    "transport": (Mapping, "a mapping of the transport's options"),
}


def _checked(key: str, value: Any) -> Any:
    kind, words = _TYPES[key]
    if not isinstance(value, kind):
        raise ConfigurationError(f"{key}={value!r}: it must be {words}", key=key, value=value)
    return value
