"""The factory: it creates a connector from a name, and raises a helpful error for a wrong name."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

import kvferry.connector
from kvferry.connector import (
    InProcConnector,
    KVConnectorBase,
    KVConnectorFactory,
    KVConnectorRole,
    KVTransferConfig,
    PeerToPeerConnector,
    SharedMemoryConnector,
)
from kvferry.connector.testing import CacheShape, engine_config
from kvferry.transports.errors import ConfigurationError
from kvferry.transports.registry import BUILT_IN, BuiltIn, register_transport

COMPLETE = """
from kvferry.connector import KVConnectorBase, SchedulerHalf, WorkerHalf

class MyScheduler(SchedulerHalf):
    def get_num_new_matched_tokens(self, request, num_computed_tokens): return 0, False
    def update_state_after_alloc(self, request, block_ids, num_external_tokens): ...
    def build_connector_meta(self, scheduler_output): ...

class MyWorker(WorkerHalf):
    def start_load_kv(self, forward_context, **kwargs): ...

class Mine(KVConnectorBase):
    def make_scheduler_half(self): return MyScheduler()
    def make_worker_half(self): return MyWorker()

class Partial(KVConnectorBase):
    def wait_for_save(self): ...

class OddConstructor(Mine):
    def __init__(self, config): ...

class Unrelated: ...
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of an importable module with connectors. Each test gets another name."""
    name = f"stranger_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(COMPLETE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def create(name: str, module_path: str = "", options: Mapping[str, object] = {}) -> KVConnectorBase:
    config = engine_config(name, kv_connector_module_path=module_path, kv_connector_extra_config=options)
    return KVConnectorFactory.create_connector(
        config, KVConnectorRole.SCHEDULER, CacheShape().kv_cache_config()
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("shm", SharedMemoryConnector),
        ("SharedMemoryConnector", SharedMemoryConnector),
        ("inproc", InProcConnector),
        ("InProcConnector", InProcConnector),
    ],
)
def test_built_in_connectors_have_two_names(name: str, expected: type[KVConnectorBase]) -> None:
    assert KVConnectorFactory.get_connector_class(KVTransferConfig(name, "kv_both")) is expected
    assert isinstance(create(name), expected)


@pytest.mark.parametrize("scheme", BUILT_IN)
def test_every_built_in_transport_has_a_connector(scheme: str) -> None:
    connector = KVConnectorFactory.get_connector_class(KVTransferConfig(scheme, "kv_both"))
    assert getattr(kvferry.connector, connector.__name__) is connector
    assert {scheme, connector.__name__} <= set(KVConnectorFactory.available_connectors())
    by_class = KVTransferConfig(connector.__name__, "kv_both")
    assert KVConnectorFactory.get_connector_class(by_class) is connector


def test_a_row_of_the_table_is_all_that_a_connector_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    row = BuiltIn("testing.delays:DelayedTransport")
    monkeypatch.setattr("kvferry.transports.registry.BUILT_IN", {**BUILT_IN, "late": row})
    connector = KVConnectorFactory.get_connector_class(KVTransferConfig("late", "kv_both"))
    assert (
        KVConnectorFactory.get_connector_class(KVTransferConfig("DelayedConnector", "kv_both")) is connector
    )
    assert kvferry.connector.DelayedConnector is connector
    assert connector.__name__ == "DelayedConnector"


def test_a_registered_transport_needs_no_connector_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.transports.registry._registered", {})
    register_transport("dove", "kvferry.transports.inproc:InProcTransport")
    connector = KVConnectorFactory.get_connector_class(KVTransferConfig("dove", "kv_both"))
    assert KVConnectorFactory.get_connector_class(KVTransferConfig("dove", "kv_both")) is connector
    assert issubclass(connector, PeerToPeerConnector)
    assert connector.transport_scheme == "dove"
    assert create("dove", options={"transport": "dove"})
    with pytest.raises(ConfigurationError, match="option 'wings' of transport"):
        connector.check_options({"transport_options": {"wings": 2}})


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigurationError,
        match="unknown connector 'SharedMemConnector': did you mean 'SharedMemoryConnector'.*kv_connector_module_path",
    ) as e:
        create("SharedMemConnector")
    assert e.value.key == "kv_connector"


def test_a_module_path_finds_a_connector_out_of_tree(module: str) -> None:
    connector = create("Mine", module)
    assert type(connector).__module__ == module


def test_a_module_path_takes_precedence_over_the_registry(module: str) -> None:
    with pytest.raises(ConfigurationError, match="has no class 'shm'"):
        create("shm", module)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Missing", "has no class 'Missing'"),
        ("Unrelated", "has no KVConnectorBase subclass 'Unrelated'"),
        ("__doc__", "has no class '__doc__'"),
        ("OddConstructor", r"must be made with \(config, role, kv_cache_config\)"),
        ("Partial", "does not implement build_connector_meta, get_num_new_matched_tokens"),
    ],
)
def test_a_class_that_is_not_a_connector_is_refused_with_the_reason(
    module: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        create(name, module)


def test_a_missing_module_is_reported() -> None:
    with pytest.raises(
        ConfigurationError, match="'no.such.module' cannot be imported: ModuleNotFoundError"
    ) as e:
        create("Mine", "no.such.module")
    assert e.value.key == "kv_connector_module_path"


def test_a_module_that_fails_to_import_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_stranger.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match="ZeroDivisionError"):
        create("Mine", "broken_stranger")


def test_a_registered_name_is_as_good_as_a_built_in_one(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    KVConnectorFactory.register_connector("mine", module, "Mine")
    KVConnectorFactory.register_connector("mine", module, "Mine")
    assert type(create("mine")).__name__ == "Mine"
    assert "mine" in KVConnectorFactory.available_connectors()
    with pytest.raises(ConfigurationError, match="registered already"):
        KVConnectorFactory.register_connector("mine", module, "Partial")


def run(code: str, path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_entry_point_is_found_and_imported_late(tmp_path: Path) -> None:
    (tmp_path / "installed_stranger.py").write_text(COMPLETE)
    info = tmp_path / "installed_stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed-stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvferry.connectors]\nfar-away = installed_stranger:Mine\n")
    output = run(
        """
        import sys
        from kvferry.connector import KVConnectorFactory, KVTransferConfig
        assert "far-away" in KVConnectorFactory.available_connectors()
        assert "installed_stranger" not in sys.modules
        print(KVConnectorFactory.get_connector_class(KVTransferConfig("far-away", "kv_both")).__name__)
        """,
        tmp_path,
    )
    assert output.strip() == "Mine"
