"""A process has one slot for a connector, and a forked child does not use its parent's connector."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from dataclasses import replace

import pytest

from kvferry.connector.base import KVConnectorBase
from kvferry.connector.config import KVTransferConfig
from kvferry.runner_mixin import (
    KVConnectorModelRunnerMixin,
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
    install_kv_transfer_group,
    kv_transfer_group,
)
from kvferry.transports.errors import KVTransferStateError


@pytest.fixture
def out_of_tree(config, make_connector, monkeypatch):
    """A configuration that names a connector by its module. Its worker half records calls."""

    class Recording(KVConnectorBase):
        def make_worker_half(self):
            return make_connector()

    module = types.ModuleType("recording_connector")
    module.Recording = Recording
    monkeypatch.setitem(sys.modules, "recording_connector", module)
    transfer = KVTransferConfig("Recording", "kv_both", kv_connector_module_path="recording_connector")
    yield replace(config, kv_transfer=transfer)
    ensure_kv_transfer_shutdown()


def test_an_empty_slot_raises_an_error_that_says_so():
    assert not has_kv_transfer_group()
    with pytest.raises(KVTransferStateError, match="ensure_kv_transfer_initialized"):
        get_kv_transfer_group()


def test_initialize_creates_the_configured_worker_half_once(out_of_tree, kv_cache_config):
    ensure_kv_transfer_initialized(out_of_tree, kv_cache_config)
    first = get_kv_transfer_group()
    ensure_kv_transfer_initialized(out_of_tree, kv_cache_config)
    assert get_kv_transfer_group() is first
    assert first.config is out_of_tree
    assert first.kv_cache_config is kv_cache_config


def test_initialize_with_other_settings_is_refused_and_keeps_the_first(out_of_tree, kv_cache_config):
    ensure_kv_transfer_initialized(out_of_tree, kv_cache_config)
    first = get_kv_transfer_group()
    with pytest.raises(KVTransferStateError, match="other settings"):
        ensure_kv_transfer_initialized(out_of_tree, replace(kv_cache_config, num_blocks=7))
    assert get_kv_transfer_group() is first


def test_initialize_without_a_connector_does_nothing(config, kv_cache_config):
    ensure_kv_transfer_initialized(replace(config, kv_transfer=None), kv_cache_config)
    assert not has_kv_transfer_group()


def test_a_second_connector_is_refused_and_the_same_one_is_not(connector, make_connector):
    install_kv_transfer_group(connector)
    with pytest.raises(KVTransferStateError, match="installed in this process already"):
        install_kv_transfer_group(make_connector())
    assert get_kv_transfer_group() is connector


def test_shutdown_happens_once(make_connector):
    connector = make_connector()
    install_kv_transfer_group(connector)
    ensure_kv_transfer_shutdown()
    ensure_kv_transfer_shutdown()
    assert connector.calls == ["shutdown"]
    assert not has_kv_transfer_group()


def test_a_shutdown_that_fails_empties_the_slot_all_the_same(make_connector):
    connector = make_connector()
    connector.raises.add("shutdown")
    install_kv_transfer_group(connector)
    with pytest.raises(OSError, match="shutdown failed"):
        KVConnectorModelRunnerMixin.ensure_kv_transfer_shutdown()
    assert not has_kv_transfer_group()


def test_the_context_manager_restores_the_former_connector(connector, make_connector):
    other = make_connector()

    @kv_transfer_group(other)
    def body() -> None:
        assert get_kv_transfer_group() is other
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        body()
    assert get_kv_transfer_group() is connector
    assert other.calls == []


def test_other_threads_see_the_connector(connector):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(get_kv_transfer_group()))
    thread.start()
    thread.join(timeout=10)
    assert seen == [connector]


AT_EXIT = """
from kvferry.runner_mixin import KVConnectorModelRunnerMixin, state

class Connector:
    def shutdown(self):
        print("shut down")

class Runner(KVConnectorModelRunnerMixin):
    def __del__(self):
        self.ensure_kv_transfer_shutdown()
        self.ensure_kv_transfer_shutdown()

runner = Runner()
runner.itself = runner
state.install_kv_transfer_group(Connector())
"""


def test_shutdown_is_harmless_while_python_ends():
    """The runner is collected only when modules are being torn down."""
    ended = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout in ("shut down\n", "")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_gets_an_error_that_names_the_connectors_process(connector):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, _what_a_child_sees(connector).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    assert f"process {os.getpid()}" in said
    assert said.endswith("then empty, shutdowns []")
    assert get_kv_transfer_group() is connector


def _what_a_child_sees(connector) -> str:
    try:
        return f"has {has_kv_transfer_group()}"
    except KVTransferStateError as error:
        ensure_kv_transfer_shutdown()
        return f"{error} then {'full' if has_kv_transfer_group() else 'empty'}, shutdowns {connector.calls}"
