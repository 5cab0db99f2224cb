"""How much memory there is, how much of it a node may use, and where its pool comes from."""

from __future__ import annotations

import pytest
import torch

from kvferry.connector.config import CacheConfig
from kvferry.runner_mixin import MemorySnapshot, allocate_pool, kv_transfer_group, request_memory
from kvferry.transports.errors import ConfigurationError, KVTransferStateError

CPU = torch.device("cpu")
GIB = 1 << 30


def test_a_share_of_the_memory_rounded_up():
    assert request_memory(MemorySnapshot(CPU, 1001, 1000), CacheConfig(memory_utilization=0.5)) == 501


def test_exactly_enough_is_enough():
    assert request_memory(MemorySnapshot(CPU, 1000, 900), CacheConfig(memory_utilization=0.9)) == 900


def test_the_error_for_too_little_memory_names_every_figure():
    with pytest.raises(ValueError, match="cpu has") as caught:
        request_memory(MemorySnapshot(CPU, 10 * GIB, 2 * GIB), CacheConfig(memory_utilization=0.8))
    for figure in ("2.00 GiB free", "10.00 GiB", "memory_utilization=0.8", "8.00 GiB"):
        assert figure in str(caught.value)


def test_other_devices_are_refused():
    with pytest.raises(ConfigurationError, match="meta"):
        MemorySnapshot.take(torch.device("meta"))


def test_the_pool_comes_from_the_connector(connector):
    assert allocate_pool(100, CPU) is connector.allocated[0]


def test_a_connector_that_returns_something_else_is_named(make_connector, monkeypatch):
    connector = make_connector()
    monkeypatch.setattr(connector, "allocate_kv_memory", lambda num_bytes, device: torch.zeros(num_bytes))
    with (
        kv_transfer_group(connector),
        pytest.raises(KVTransferStateError, match="RecordingConnector.allocate_kv_memory"),
    ):
        allocate_pool(100, CPU)
