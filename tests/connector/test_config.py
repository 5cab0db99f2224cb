"""Configuration: settings become frozen values, or an error that names the key."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvferry.connector import KVConnectorRole, KVTransferConfig, SharedMemoryConnector
from kvferry.connector.factory import KVConnectorFactory
from kvferry.connector.p2p.connector import PeerToPeerConnector
from kvferry.connector.p2p.options import ConnectorOptions
from kvferry.connector.testing import CacheShape, engine_config
from kvferry.transports.errors import ConfigurationError, KVTransferStateError


def test_a_user_may_write_vllms_names() -> None:
    config = KVTransferConfig.from_mapping(
        {
            "kv_connector": "SharedMemoryConnector",
            "kv_role": "kv_both",
            "engine_id": "node-1",
            "kv_connector_extra_config": {"lease_s": 5},
            "kv_load_failure_policy": "fail",
        }
    )
    assert config.is_kv_producer
    assert config.is_kv_consumer
    assert config.kv_load_failure_policy == "fail"


@pytest.mark.parametrize(
    ("mapping", "key"),
    [
        ({"kv_role": "kv_both"}, "kv_connector"),
        ({"kv_connector": "shm"}, "kv_role"),
        ({"kv_connector": "", "kv_role": "kv_both"}, "kv_connector"),
        ({"kv_connector": "shm", "kv_role": "producer"}, "kv_role"),
        ({"kv_connector": "shm", "kv_role": "kv_both", "kv_rank": 0}, "kv_rank"),
        (
            {"kv_connector": "shm", "kv_role": "kv_both", "kv_load_failure_policy": "retry"},
            "kv_load_failure_policy",
        ),
    ],
)
def test_a_bad_key_is_named(mapping: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigurationError, match=key) as caught:
        KVTransferConfig.from_mapping(mapping)
    assert caught.value.key == key


def test_two_nodes_never_share_an_engine_id_by_default() -> None:
    assert KVTransferConfig("shm", "kv_both").engine_id != KVTransferConfig("shm", "kv_both").engine_id


def test_options_have_defaults() -> None:
    options = ConnectorOptions.from_mapping({})
    assert options == ConnectorOptions()
    assert options.cross_layer_blocks
    assert options.handoff.lease_s == 30


def test_options_of_all_kinds_can_be_combined() -> None:
    options = ConnectorOptions.from_mapping(
        {
            "cross_layer_blocks": False,
            "address": "shm://@x",
            "lease_s": 4,
            "transport_options": {"a": 1},
        }
    )
    assert not options.cross_layer_blocks
    assert options.handoff.lease_s == 4
    assert options.transport_options == {"a": 1}
    assert options.transport == "shm"


@pytest.mark.parametrize(
    ("mapping", "key"),
    [
        ({"cross_layers_blocks": True}, "cross_layers_blocks"),
        ({"cross_layer_blocks": 1}, "cross_layer_blocks"),
        ({"address": 7}, "address"),
        ({"transfer": "pull"}, "transfer"),
        ({"transport": 3}, "transport"),
        ({"transport_options": "fast"}, "transport_options"),
        ({"lease_s": "30"}, "lease_s"),
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"heartbeat_s": 1}, "heartbeat_s"),
    ],
)
def test_a_bad_option_is_named(mapping: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigurationError, match=key) as caught:
        ConnectorOptions.from_mapping(mapping)
    assert caught.value.key == key


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_both_halves_refuse_an_unknown_option(role: KVConnectorRole) -> None:
    config = engine_config("shm", kv_connector_extra_config={"color": "red"})
    with pytest.raises(ConfigurationError, match="unknown connector option 'color'"):
        SharedMemoryConnector(config, role, CacheShape().kv_cache_config())


def test_the_transport_refuses_an_unknown_option() -> None:
    config = engine_config("shm", kv_connector_extra_config={"transport_options": {"color": "red"}})
    with pytest.raises(ConfigurationError, match="'color'"):
        SharedMemoryConnector(config, KVConnectorRole.WORKER, CacheShape().kv_cache_config())


@pytest.mark.parametrize("connector", ["shm", "zeromq"])
def test_a_transport_s_options_under_their_old_key_are_refused_with_the_new_one(connector: str) -> None:
    config = KVTransferConfig(
        connector, "kv_both", kv_connector_extra_config={"transport": {"num_guards": 7}}
    )
    with pytest.raises(ConfigurationError) as caught:
        KVConnectorFactory.check_options(config)
    assert (caught.value.key, caught.value.value) == ("transport", {"num_guards": 7})
    assert "{'num_guards': 7}" in str(caught.value)
    assert "the transport's own options go under transport_options" in str(caught.value)


def test_the_transport_may_be_named_together_with_its_connector() -> None:
    options: dict[str, Any] = {"transport": "shm", "transport_options": {"num_guards": 7}}
    KVConnectorFactory.check_options(KVTransferConfig("shm", "kv_both", kv_connector_extra_config=options))
    with pytest.raises(
        ConfigurationError, match="transport='shm' does not fit.*set kv_connector to 'shm'"
    ) as e:
        KVConnectorFactory.check_options(
            KVTransferConfig("zeromq", "kv_both", kv_connector_extra_config=options)
        )
    assert e.value.key == "transport"


@pytest.mark.parametrize(
    ("connector", "options", "words"),
    [
        ("shm", {"leas_s": 1}, "unknown connector option 'leas_s': did you mean 'lease_s'? known: address, "),
        ("zeromq", {"adress": "a"}, "unknown connector option 'adress': did you mean 'address'? "),
        ("shm", {"color": "red"}, "unknown connector option 'color'; known: address, "),
        ("shm", {"transport_options": {"copy_thread": 2}}, "option 'copy_thread' of transport 'shm': did you mean 'copy_threads'? "),
        ("zeromq", {"transport_options": {"prot": 2}}, "option 'prot' of transport 'zeromq': did you mean 'port'? "),
        ("inproc", {"transport_options": {"guards": 2}}, "did you mean 'num_guards'? "),
        ("auto", {"transport_options": {"netwrok": "zeromq"}}, "did you mean 'network'? "),
        ("auto", {"transport_options": {"local_options": {"copy_thread": 2}}}, "did you mean 'copy_threads'? "),
        ("auto", {"transport_options": {"network": "zeromq", "network_options": {"prot": 2}}}, "did you mean 'port'? "),
        ("auto", {"transport_options": {"network": "zeromk"}}, "unknown transport 'zeromk': did you mean 'zeromq'? "),
    ],
    ids=str,
)  # fmt: skip
def test_an_unknown_option_is_reported_with_the_nearest_name_before_there_is_a_pool(
    connector: str, options: dict[str, Any], words: str
) -> None:
    config = KVTransferConfig(connector, "kv_both", kv_connector_extra_config=options)
    with pytest.raises(ConfigurationError) as caught:
        KVConnectorFactory.check_options(config)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backoff_s": 1}, "unknown connector option 'backoff_s'"),
        ({"transport_options": {"inline_bytes": 0}}, "unknown option 'inline_bytes' of transport 'shm'"),
    ],
)
def test_an_internal_field_is_no_option(options: dict[str, Any], words: str) -> None:
    config = KVTransferConfig("shm", "kv_both", kv_connector_extra_config=options)
    with pytest.raises(ConfigurationError) as caught:
        KVConnectorFactory.check_options(config)
    _, _, known = str(caught.value).partition(words)
    assert ": " in known
    assert not {"backoff_s", "inline_bytes"} & set(known.split(", "))


def test_values_are_checked_as_well() -> None:
    config = KVTransferConfig(
        "shm", "kv_both", kv_connector_extra_config={"transport_options": {"copy_threads": 0}}
    )
    with pytest.raises(ConfigurationError, match="copy_threads must be an integer from 1 to 64, got 0"):
        KVConnectorFactory.check_options(config)


def test_an_unknown_key_of_the_configuration_is_reported_with_the_nearest_name() -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'kv_role'"):
        KVTransferConfig.from_mapping({"kv_connector": "shm", "kv_rol": "kv_both"})


class WithOptionsOfItsOwn(SharedMemoryConnector):
    def __init__(self, *args: Any) -> None:
        raise NotImplementedError


def test_a_connector_with_its_own_constructor_checks_its_options_itself() -> None:
    WithOptionsOfItsOwn.check_options({"wings": 2})


def test_a_connector_needs_a_transfer_configuration() -> None:
    config = dataclasses.replace(engine_config("shm"), kv_transfer=None)
    with pytest.raises(KVTransferStateError, match="kv_transfer"):
        SharedMemoryConnector(config, KVConnectorRole.SCHEDULER, CacheShape().kv_cache_config())


@pytest.mark.parametrize("wanted", [True, False])
def test_cross_layer_blocks_are_one_setting(wanted: bool) -> None:
    config = engine_config("shm", kv_connector_extra_config={"cross_layer_blocks": wanted})
    connector = SharedMemoryConnector(config, KVConnectorRole.SCHEDULER, CacheShape().kv_cache_config())
    assert isinstance(connector, PeerToPeerConnector)
    assert connector.prefer_cross_layer_blocks is wanted
