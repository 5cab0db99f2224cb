"""The options of a peer-to-peer connector: the mapping `kv_connector_extra_config`, parsed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Self

from ...transports.checked import Refused, each, shown, text
from ...transports.errors import ConfigurationError
from ...transports.options import option_names, require_known, require_valid, unknown_key
from ...transports.registry import available_transports
from ..handoff.config import HandoffConfig

_TIMING_KEYS = option_names(HandoffConfig)


def _scheme(value: object) -> str:
    if isinstance(value, str):
        return value
    hint = "; the transport's own options go under transport_options" if isinstance(value, Mapping) else ""
    raise Refused(f"must be the name of a transport, e.g. 'shm', got {shown(value)}{hint}")


@dataclass(frozen=True)
class ConnectorOptions:
    """Options of a connector that reads a peer's pool.

    Attributes:
        cross_layer_blocks: Ask for the uniform layout: each block of all layers is one run of bytes.
        address: Where to listen, in the transport's own form; empty lets the transport choose.
        transport: Scheme of the transport that carries the bytes, e.g. `"shm"`.
        transport_options: The transport's own options; it refuses those that it does not know.
        require_transport: The ways in which this node may read from peers, e.g. `["shm", "ucx:rc_mlx5"]`.
            After the colon stand the parts that a transfer's `mechanism` may have, or patterns of them. A
            peer that is reached in another way is refused, and its loads fail. Empty: any way.
        trace: Keep the spans of each handoff (offers, claims, grants, loads, reads) among the connector's
            stats, for `kvferry explain`. Costs a few microseconds per message.
        weights_by_name: Inside vLLM, a model of which no file is on this machine is compared with those of
            peers by its name. Otherwise it needs a commit as its revision. Set it only if all nodes surely
            load the same weights.
        handoff: Deadlines and bounds. A user writes each beside the other options, e.g. `{"lease_s": 10}`.

    Raises:
        ConfigurationError: a value is not allowed; the error names its key.
    """

    cross_layer_blocks: bool = True
    address: str = ""
    transport: Annotated[str, _scheme] = "shm"
    transport_options: Mapping[str, object] = field(default_factory=dict)
    require_transport: Annotated[Sequence[str], each(text(100, 1), 32)] = ()
    trace: bool = False
    weights_by_name: bool = False
    handoff: HandoffConfig = field(default_factory=HandoffConfig)

    def __post_init__(self) -> None:
        require_valid(self)
        for name in self.require_transport:
            scheme = name.partition(":")[0]
            if scheme not in (known := available_transports()):
                what = f"require_transport={name!r} names the unknown transport {scheme!r}"
                raise unknown_key(what, scheme, known, key="require_transport", value=name)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], scheme: str = "") -> Self:
        """Parse what a user wrote.

        Args:
            scheme: Of a connector that stands for one transport: the option `transport` may be left out, and
                may not name another one. Empty: the user chooses.

        Raises:
            ConfigurationError: a key is unknown, or has a value that is not allowed; the error names it.
        """
        require_known(mapping, (*_OWN_KEYS, *_TIMING_KEYS), "connector option")
        own = {key: mapping[key] for key in _OWN_KEYS if key in mapping}
        timing = {key: mapping[key] for key in _TIMING_KEYS if key in mapping}
        if scheme:
            own.setdefault("transport", scheme)
        options = cls(**own, handoff=HandoffConfig(**timing))
        if scheme and options.transport != scheme:
            raise ConfigurationError(
                f"transport={options.transport!r} does not fit this connector, which stands for {scheme!r}: leave "
                f"transport out, or set kv_connector to {options.transport!r}",
                key="transport",
                value=options.transport,
            )
        return options


_OWN_KEYS = tuple(option.name for option in fields(ConnectorOptions) if option.name != "handoff")
