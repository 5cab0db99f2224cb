"""The connector in the table of NVIDIA Dynamo, tested on Dynamo's own function.

`make tools` gets Dynamo's package.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvferry.connector.p2p.params import parse_transfer_params
from kvferry.connector.vllm.dynamo import TABLE_MODULE, register_with_dynamo

#: Where `make build/dynamo` puts it.
BUILT = Path(__file__).parents[2] / "build" / "dynamo"
NAME = "KvferryConnector"


@pytest.fixture(autouse=True)
def forget_dynamo() -> Iterator[None]:
    """Let each test import a Dynamo of its own."""
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "dynamo"]:
        del sys.modules[name]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Dynamo's own module with the table."""
    if not BUILT.is_dir():
        pytest.skip("Dynamo is not installed; `make tools` gets its package")
    monkeypatch.syspath_prepend(BUILT)
    invalidate_caches()
    return import_module(TABLE_MODULE)


def config_of(connector: str, **extra: Any) -> SimpleNamespace:
    """The part of vLLM's configuration at which Dynamo looks."""
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)
    )


def test_dynamo_refuses_the_connector_until_it_is_registered(table: ModuleType) -> None:
    with pytest.raises(ValueError, match=NAME):
        table.make_kv_connector_protocol(config_of(NAME))
    register_with_dynamo(NAME)
    register_with_dynamo(NAME)
    protocol = table.make_kv_connector_protocol(config_of(NAME))
    asked = parse_transfer_params(protocol.prefill_request_kv_transfer_params())
    assert asked.offer_result
    offer = {"remote_lease": "7fffffffffffffff", "remote_addresses": ["shm:a"]}
    answer = SimpleNamespace(kv_transfer_params=offer)
    assert protocol.decode_request_kv_transfer_params(answer) == offer


def test_dynamo_finds_the_connector_inside_vllms_multi_connector(table: ModuleType) -> None:
    register_with_dynamo(NAME)
    children = [{"kv_connector": "LMCacheMPConnector"}, {"kv_connector": NAME}]
    protocol = table.make_kv_connector_protocol(config_of("MultiConnector", connectors=children))
    assert protocol.prefill_request_kv_transfer_params()["do_remote_decode"] is True


def test_a_row_that_dynamo_brings_itself_is_kept(table: ModuleType) -> None:
    theirs = table.MooncakeConnectorProtocol
    table.KV_CONNECTOR_PROTOCOLS[NAME] = theirs
    register_with_dynamo(NAME)
    assert table.KV_CONNECTOR_PROTOCOLS[NAME] is theirs


def test_without_dynamo_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    register_with_dynamo(NAME)
    assert not caplog.records
    assert TABLE_MODULE not in sys.modules


@pytest.mark.parametrize(
    "content",
    [None, "KV_CONNECTOR_PROTOCOLS = {}", "raise RuntimeError('needs a GPU')", "import no_such_package"],
    ids=["no table", "no protocol of NixlConnector", "fails to import", "needs another package"],
)
def test_another_version_of_dynamo_costs_one_warning(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = tmp_path / "dynamo" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    if content is not None:
        (package / "kv_connector_protocols.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    register_with_dynamo(NAME)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "install ai-dynamo 1.6.1" in record.getMessage()
