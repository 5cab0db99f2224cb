"""Finding the class of a connector by its name.

If `kv_connector_module_path` is given, the name is a class of that module. Otherwise it is, in this order: a
name registered in this process; a built-in transport's scheme, e.g. `"shm"`, or its connector's class, e.g.
`"SharedMemoryConnector"`; an entry point of the group `kvferry.connectors`; or the scheme of any other
transport. A module is imported at its first use.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, ClassVar

from ..transports.errors import ConfigurationError, KVTransferStateError
from ..transports.loading import load_class
from ..transports.options import unknown_key
from .base import KVConnectorBase, KVConnectorRole

if TYPE_CHECKING:
    from .config import EngineConfig, KVTransferConfig
    from .kv_cache_specs import KVCacheConfig

ENTRY_POINT_GROUP = "kvferry.connectors"


class KVConnectorFactory:
    """Makes connectors by name."""

    #: Name → `module:Class`.
    _registry: ClassVar[dict[str, str]] = {}

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Make `name` stand for a class. The module is imported at the first use of the connector.

        Raises:
            ConfigurationError: `name` stands for another class already, and still does.
        """
        target = f"{module_path}:{class_name}"
        scheme = built_in_schemes().get(name)
        known = f"the connector over transport {scheme!r}" if scheme else cls._registry.get(name, target)
        if known != target:
            raise ConfigurationError(
                f"connector {name!r} is registered already, as {known}", key=name, value=target
            )
        cls._registry[name] = target

    @classmethod
    def available_connectors(cls) -> tuple[str, ...]:
        """Return every name that needs no module path, sorted."""
        from ..transports.registry import available_transports

        return tuple(sorted({*cls._registry, *built_in_schemes(), *_installed(), *available_transports()}))

    @classmethod
    def get_connector_class(cls, kv_transfer_config: KVTransferConfig) -> type[KVConnectorBase]:
        """Import the class that a configuration names.

        Raises:
            ConfigurationError: the name is unknown, its module cannot be imported, it lacks the class, or the
                class is not a connector. Nothing was made.
            BackendUnavailableError: the connector's own requirements are missing; the message says which.
        """
        name, module_path = kv_transfer_config.kv_connector, kv_transfer_config.kv_connector_module_path
        what = f"connector {name!r}"
        if module_path:
            return load_class(
                f"{module_path}:{name}", KVConnectorBase, what=what, key="kv_connector_module_path"
            )
        if (target := cls._registry.get(name)) is not None:
            return load_class(target, KVConnectorBase, what=what, key="kv_connector")
        if (scheme := built_in_schemes().get(name)) is not None:
            return _connector_over(scheme)
        if (target := _installed().get(name)) is not None:
            return load_class(target, KVConnectorBase, what=what, key="kv_connector")
        known = cls.available_connectors()
        if name in known:
            return _connector_over(name)
        error = unknown_key(f"unknown {what}", name, known, key="kv_connector", value=name)
        hint = "for one of your own, set kv_connector_module_path"
        raise ConfigurationError(f"{error}; {hint}", key="kv_connector", value=name)

    @classmethod
    def check_options(cls, kv_transfer_config: KVTransferConfig) -> None:
        """Refuse a configuration from which no connector can be made, before anything expensive is done.

        Raises:
            ConfigurationError: see `get_connector_class`; or the connector refuses its options. A connector
                without a `check_options` of its own refuses them only when it is made.
            BackendUnavailableError: the connector's own requirements are missing; the message says which.
        """
        cls.get_connector_class(kv_transfer_config).check_options(
            kv_transfer_config.kv_connector_extra_config
        )

    @classmethod
    def create_connector(
        cls, config: EngineConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> KVConnectorBase:
        """Make the scheduler half or the worker half of the connector that `config.kv_transfer` names.

        Raises:
            KVTransferStateError: `config.kv_transfer` is None.
            ConfigurationError: see `get_connector_class`; or the connector refuses its options.
        """
        if config.kv_transfer is None:
            raise KVTransferStateError("cannot make a connector: EngineConfig.kv_transfer is None; set it")
        connector_class = cls.get_connector_class(config.kv_transfer)
        _require_constructor(connector_class, config.kv_transfer.kv_connector)
        return connector_class(config, role, kv_cache_config)


def connector_name(target: str) -> str:
    """Name the connector over a transport after its class, e.g.

    `"UCXConnector"` for `"…ucx:UCXTransport"`.
    """
    return target.partition(":")[2].removesuffix("Transport") + "Connector"


# The functions below import what they need themselves: each import takes as long as that of this whole
# package.


def built_in_schemes() -> dict[str, str]:
    """Return the built-in transports' schemes by the two names of each connector: the scheme, and its class's
    name.
    """
    from ..transports.registry import BUILT_IN

    by_class = {connector_name(row.target): scheme for scheme, row in BUILT_IN.items()}
    return {**by_class, **{scheme: scheme for scheme in BUILT_IN}}


def _installed() -> dict[str, str]:
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def _connector_over(scheme: str) -> type[KVConnectorBase]:
    from .p2p.connector import connector_over

    return connector_over(scheme)


def _require_constructor(connector_class: type[KVConnectorBase], name: str) -> None:
    try:
        inspect.signature(connector_class).bind("config", "role", "kv_cache_config")
    except TypeError as error:
        raise ConfigurationError(
            f"connector {name!r}: {connector_class.__qualname__} must be made with (config, role, kv_cache_config), "
            f"but its signature is {inspect.signature(connector_class)}",
            key="kv_connector",
            value=name,
        ) from error
    if missing := sorted(connector_class.__abstractmethods__):
        raise ConfigurationError(
            f"connector {name!r}: {connector_class.__qualname__} does not implement {', '.join(missing)}",
            key="kv_connector",
            value=name,
        )
