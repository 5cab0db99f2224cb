"""From the name of a connector to the connector: built-in, registered, installed, or in a module of yours.

A name is looked up in this order: the module in `kv_connector_module_path`, if one is given, and nowhere else;
names registered in this process, the built-in ones among them; entry points of the group `kvferry.connectors`.
Nothing is imported before it is asked for.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

from ..transports.errors import BackendUnavailableError, ConfigurationError, KVTransferStateError
from .base import KVConnectorBase, KVConnectorRole

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from .config import EngineConfig, KVTransferConfig
    from .kv_cache_specs import KVCacheConfig

_ENTRY_POINT_GROUP = "kvferry.connectors"


class KVConnectorFactory:
    """Makes connectors by name."""

    #: Name → (module, class). A transport's short name stands for its connector.
    _registry: ClassVar[dict[str, tuple[str, str]]] = {
        "AutoConnector": ("kvferry.connector.auto", "AutoConnector"),
        "InProcConnector": ("kvferry.connector.inproc", "InProcConnector"),
        "MultiConnector": ("kvferry.connector.multi", "MultiConnector"),
        "SharedMemoryConnector": ("kvferry.connector.shm", "SharedMemoryConnector"),
        "UCXConnector": ("kvferry.connector.ucx", "UCXConnector"),
        "ZeroMQConnector": ("kvferry.connector.zeromq", "ZeroMQConnector"),
        "auto": ("kvferry.connector.auto", "AutoConnector"),
        "inproc": ("kvferry.connector.inproc", "InProcConnector"),
        "shm": ("kvferry.connector.shm", "SharedMemoryConnector"),
        "ucx": ("kvferry.connector.ucx", "UCXConnector"),
        "zeromq": ("kvferry.connector.zeromq", "ZeroMQConnector"),
    }

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Make `name` stand for a class. The module is imported when the connector is first asked for.

        Raises:
            ConfigurationError: `name` stands for another class already. It still does.
        """
        known = cls._registry.setdefault(name, (module_path, class_name))
        if known != (module_path, class_name):
            raise ConfigurationError(
                f"connector {name!r} is registered already, as {known[0]}.{known[1]}",
                key=name,
                value=class_name,
            )

    @classmethod
    def available_connectors(cls) -> tuple[str, ...]:
        """Every name that needs no module path, sorted."""
        return tuple(sorted({*cls._registry, *_installed()}))

    @classmethod
    def get_connector_class(cls, kv_transfer_config: KVTransferConfig) -> type[KVConnectorBase]:
        """The class that a configuration names.

        Raises:
            ConfigurationError: the name is unknown, its module cannot be imported, it lacks the class, or the
                class is no connector. Nothing was made.
            BackendUnavailableError: the connector's own requirements are missing; the message says which.
        """
        name, module_path = kv_transfer_config.kv_connector, kv_transfer_config.kv_connector_module_path
        if module_path:
            return _load(name, module_path, name, key="kv_connector_module_path")
        if name in cls._registry:
            return _load(name, *cls._registry[name], key="kv_connector")
        if name in (installed := _installed()):
            module, _, attribute = installed[name].value.partition(":")
            return _load(name, module, attribute, key="kv_connector")
        raise ConfigurationError(
            f"unknown connector {name!r}; known: {', '.join(cls.available_connectors())}; "
            "for one of your own, set kv_connector_module_path",
            key="kv_connector",
            value=name,
        )

    @classmethod
    def check_options(cls, kv_transfer_config: KVTransferConfig) -> None:
        """Refuse what no connector could be made of, before anything expensive is done for it.

        Raises:
            ConfigurationError: see `get_connector_class`; or the connector refuses its options. One that does not say
                which it knows refuses them when it is made.
            BackendUnavailableError: the connector's own requirements are missing; the message says which.
        """
        cls.get_connector_class(kv_transfer_config).check_options(
            kv_transfer_config.kv_connector_extra_config
        )

    @classmethod
    def create_connector(
        cls, config: EngineConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> KVConnectorBase:
        """Make one half of the connector that `config.kv_transfer` names.

        Raises:
            KVTransferStateError: `config.kv_transfer` is None.
            ConfigurationError: see `get_connector_class`; or the connector refuses its options.
        """
        if config.kv_transfer is None:
            raise KVTransferStateError("a connector needs EngineConfig.kv_transfer")
        connector_class = cls.get_connector_class(config.kv_transfer)
        _require_constructor(connector_class, config.kv_transfer.kv_connector)
        return connector_class(config, role, kv_cache_config)


def _installed() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # as slow to import as all of this package

    return {point.name: point for point in entry_points(group=_ENTRY_POINT_GROUP)}


def _load(name: str, module_path: str, class_name: str, *, key: str) -> type[KVConnectorBase]:
    try:
        module = import_module(module_path)
    except BackendUnavailableError:
        raise
    except Exception as error:  # the module is a stranger's: whatever it raises is about this setting
        raise ConfigurationError(
            f"connector {name!r}: module {module_path!r} cannot be imported: {type(error).__name__}: {error}",
            key=key,
            value=module_path,
        ) from error
    found = getattr(module, class_name, None)
    if not (inspect.isclass(found) and issubclass(found, KVConnectorBase)):
        what = "has no class" if found is None else "has no KVConnectorBase subclass"
        raise ConfigurationError(
            f"connector {name!r}: module {module_path!r} {what} {class_name!r}", key=key, value=class_name
        )
    return found


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
