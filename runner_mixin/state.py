"""The worker half of this process's connector, in one slot.

The mixin, the allocation of caches and the layer hook read it; a host fills and empties it, and may ask the
half in it for what the mixin does not pass on, such as its handshake metadata. The slot is process-wide
because an attention layer has no handle to its runner. It remembers the process that filled it: after a
`fork` the child has the connector's object, but none of its threads and sockets.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..connector.base import KVConnectorBase, KVConnectorRole, WorkerHalf
from ..transports.errors import KVTransferStateError
from ..transports.limited_log import LimitedLog
from ..transports.outside import bug_log

if TYPE_CHECKING:
    from ..connector.config import EngineConfig
    from ..connector.kv_cache_specs import KVCacheConfig


@dataclass(frozen=True)
class _Slot:
    connector: WorkerHalf
    pid: int
    hook_log: LimitedLog = field(default_factory=lambda: bug_log(logging.getLogger(__name__)))


_slot: _Slot | None = None


def has_kv_transfer_group() -> bool:
    """Return whether this process has a connector.

    Raises:
        KVTransferStateError: the connector belongs to the process that this one was forked from.
    """
    return _own_slot() is not None


def get_kv_transfer_group() -> WorkerHalf:
    """Return this process's connector.

    Raises:
        KVTransferStateError: there is none, or it belongs to the process that this one was forked from.
    """
    slot = _own_slot()
    if slot is None:
        raise KVTransferStateError(
            "this process has no KV connector; call ensure_kv_transfer_initialized first"
        )
    return slot.connector


def hook_log() -> LimitedLog:
    """Return the log for what this connector's hooks raise.

    A hook that raises in every step does not fill the disk.

    Raises:
        KVTransferStateError: as `get_kv_transfer_group`.
    """
    get_kv_transfer_group()
    assert _slot is not None
    return _slot.hook_log


def install_kv_transfer_group(connector: WorkerHalf) -> None:
    """Make `connector` this process's connector. Calling this again with the same one does nothing.

    Raises:
        KVTransferStateError: another connector is installed. It stays.
    """
    global _slot
    slot = _own_slot()
    if slot is not None and slot.connector is not connector:
        raise KVTransferStateError(
            f"cannot install a {type(connector).__name__}: a {type(slot.connector).__name__} is installed in this "
            "process already; shut it down with ensure_kv_transfer_shutdown first"
        )
    _slot = _Slot(connector, os.getpid())


def ensure_kv_transfer_initialized(config: EngineConfig, kv_cache_config: KVCacheConfig) -> None:
    """Create and install the worker half that `config.kv_transfer` names; do nothing if it is None.

    Calling this again with equal arguments does nothing.

    Raises:
        KVTransferStateError: a connector with other settings is installed. It stays.
        ConfigurationError: the connector or one of its options is unknown. Nothing is installed.
    """
    if config.kv_transfer is None:
        return
    slot = _own_slot()
    if slot is not None:
        _require_same(slot.connector, config, kv_cache_config)
        return
    # Imported here so that importing this module does not load the registry of connectors.
    from ..connector.factory import KVConnectorFactory

    install_kv_transfer_group(
        KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv_cache_config)
    )


def ensure_kv_transfer_shutdown() -> None:
    """Shut this process's connector down, if there is one, and empty the slot.

    In a forked child this only empties the slot, because the connector is its parent's. The slot is empty
    even if the connector's `shutdown` raises.
    """
    global _slot
    slot, _slot = _slot, None
    if slot is not None and slot.pid == os.getpid():
        slot.connector.shutdown()


@contextmanager
def kv_transfer_group(connector: WorkerHalf) -> Iterator[WorkerHalf]:
    """Install `connector` for the duration of a `with`, then restore what was there. Shuts nothing down."""
    global _slot
    before, _slot = _slot, _Slot(connector, os.getpid())
    try:
        yield connector
    finally:
        _slot = before


def _own_slot() -> _Slot | None:
    slot = _slot
    if slot is not None and slot.pid != os.getpid():
        raise KVTransferStateError(
            f"the KV connector of this process belongs to process {slot.pid}, which forked it: "
            "start workers with spawn, or call ensure_kv_transfer_shutdown in the child to forget it"
        )
    return slot


def _require_same(connector: WorkerHalf, config: EngineConfig, kv_cache_config: KVCacheConfig) -> None:
    # A bare `WorkerHalf` does not know its settings, so nothing shows that they are the same.
    if (
        not isinstance(connector, KVConnectorBase)
        or connector.config != config
        or connector.kv_cache_config != kv_cache_config
    ):
        raise KVTransferStateError(
            f"cannot initialize the KV connector: a {type(connector).__name__} with other settings is installed already; "
            "shut it down with ensure_kv_transfer_shutdown first"
        )
