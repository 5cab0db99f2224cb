"""Several connectors on one node, in order: the first that can serve a load does so, and all of them save."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Self, cast

from ...transports.checked import text
from ...transports.errors import ConfigurationError
from ...transports.options import from_mapping, require_known, require_valid
from ..base import KVConnectorBase
from ..config import KVTransferConfig
from ..factory import KVConnectorFactory
from .scheduler import MultiScheduler
from .worker import MultiWorker

_OPTION = "connectors"


@dataclass(frozen=True)
class ChildOptions:
    """One entry of the option `connectors`. The names are those of `KVTransferConfig`.

    Attributes:
        name: The child's name in `kv_transfer_params`, the same on both nodes. If empty, the name of its class.
    """

    kv_connector: Annotated[str, text(max_chars=1024, min_chars=1)]
    kv_connector_module_path: str = ""
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self) -> None:
        require_valid(self)

    @classmethod
    def from_mapping(cls, mapping: Any) -> Self:
        """Parse one entry as the user wrote it.

        Raises:
            ConfigurationError: it is not a mapping, lacks `kv_connector`, or has an unknown key or a value of the
                wrong type.
        """
        if not isinstance(mapping, Mapping):
            raise _error(f"each entry must be a mapping, not {mapping!r}", mapping)
        return from_mapping(cls, mapping, "key", f" in an entry of option {_OPTION!r}")


class MultiConnector(KVConnectorBase):
    """Use several connectors, its children, as one.

    Its only option is `connectors`, an ordered list; see `ChildOptions`. Each request is loaded by the first child that
    can load it, and every child may save or offer it. The engine keeps the request's blocks until every child that holds
    them has released them. The first child that allocates memory allocates the pool; the others treat the pool as memory
    that is not theirs. The uniform layout is used if all children prefer it. Figures are added up if they are
    `KVConnectorStats`; others are left out.

    Raises:
        KVTransferStateError: `config.kv_transfer` is None.
        ConfigurationError: an option is unknown or has a bad value, two children have the same name, or a child refuses
            its options.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        for child in _parse(options):
            KVConnectorFactory.check_options(
                KVTransferConfig(
                    kv_connector=child.kv_connector,
                    kv_role="kv_both",
                    kv_connector_module_path=child.kv_connector_module_path,
                    kv_connector_extra_config=child.kv_connector_extra_config,
                )
            )

    def make_scheduler_half(self) -> MultiScheduler:
        return MultiScheduler(self._make_children())

    def make_worker_half(self) -> MultiWorker:
        return MultiWorker(self._make_children())

    @property
    def children(self) -> Mapping[str, KVConnectorBase]:
        """The children by name, in their order."""
        return cast(Mapping[str, KVConnectorBase], cast(MultiScheduler | MultiWorker, self._half).children)

    def _make_children(self) -> dict[str, KVConnectorBase]:
        children: dict[str, KVConnectorBase] = {}
        with ExitStack() as stack:  # if one child cannot be made, the ones before it are shut down
            for options in _parse(self.kv_transfer_config.kv_connector_extra_config):
                transfer = replace(
                    self.kv_transfer_config,
                    kv_connector=options.kv_connector,
                    kv_connector_module_path=options.kv_connector_module_path,
                    kv_connector_extra_config=options.kv_connector_extra_config,
                )
                name = options.name or KVConnectorFactory.get_connector_class(transfer).__name__
                if name in children:
                    raise _error(f"two children are called {name!r}; give one of them another 'name'", name)
                config = replace(self.config, kv_transfer=transfer)
                children[name] = KVConnectorFactory.create_connector(config, self.role, self.kv_cache_config)
                stack.callback(children[name].shutdown)
            stack.pop_all()
        return children


def _parse(options: Mapping[str, Any]) -> list[ChildOptions]:
    require_known(options, (_OPTION,), "connector option")
    entries = options.get(_OPTION)
    if not isinstance(entries, list | tuple) or not entries:
        raise _error(f"must be a list of at least one connector, not {entries!r}", entries)
    return [ChildOptions.from_mapping(entry) for entry in entries]


def _error(why: str, value: object) -> ConfigurationError:
    return ConfigurationError(f"option {_OPTION!r}: {why}", key=_OPTION, value=value)
