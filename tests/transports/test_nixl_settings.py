"""The options of `nixl`, as far as they can be checked without NIXL."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from kvferry.transports.errors import BackendUnavailableError, ConfigurationError
from kvferry.transports.nixl import NIXLOptions, NIXLTransport, library
from kvferry.transports.nixl.options import Address
from kvferry.transports.registry import load_transport


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)


# -- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"backends": ""}, "backends"),
        ({"backends": "UCX,UCX", "refuse_tcp": False}, "backends"),
        ({"backends": "LIBFABRIC"}, "refuse_tcp"),
        ({"tls": "rc,tcp"}, "refuse_tcp"),
        ({"tsl": "rc"}, "tsl"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigurationError, match=key) as caught:
        NIXLTransport(options)
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("options", "inherited", "tls"),
    [
        ({}, "", "^tcp"),
        ({}, "all", "^tcp"),
        ({}, "^ib", "^ib,tcp"),
        ({}, "^tcp,ib", "^tcp,ib"),
        ({}, "rc,sm", "rc,sm"),
        ({"tls": "sm"}, "rc,tcp", "sm"),
        ({"refuse_tcp": False}, "rc,tcp", "rc,tcp"),
        ({"refuse_tcp": False}, "", None),
    ],
)
def test_tcp_is_left_out_of_what_ucx_may_use(
    options: dict[str, Any], inherited: str, tls: str | None
) -> None:
    assert NIXLOptions(**options).environment({"UCX_TLS": inherited}).get("UCX_TLS") == tls


def test_tcp_in_the_environment_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="UCX_TLS='rc,tcp' in the environment"):
        NIXLOptions().environment({"UCX_TLS": "rc,tcp"})


@pytest.mark.parametrize(
    ("options", "devices"),
    [({}, "lo"), ({"allow_plaintext": True}, None), ({"net_devices": "mlx5_0:1"}, "mlx5_0:1")],
)
def test_only_loopback_is_used_unless_allowed(options: dict[str, Any], devices: str | None) -> None:
    assert NIXLOptions(**options).environment({}).get("UCX_NET_DEVICES") == devices


def test_another_machine_is_refused_unless_plaintext_is_allowed() -> None:
    with pytest.raises(ConfigurationError, match="allow_plaintext=true"):
        NIXLOptions().require_reachable_by("192.0.2.1")
    NIXLOptions(allow_plaintext=True).require_reachable_by("192.0.2.1")


def test_an_address_survives_being_written() -> None:
    assert str(Address.parse("nixl://[::1]:70")) == "nixl://[::1]:70"


# -- what it needs ------------------------------------------------------------------------------------


def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(library, "find_spec", lambda name: None if "nixl" in name else real(name))
    library._library.cache_clear()
    try:
        with pytest.raises(BackendUnavailableError, match="pip install nixl-cu12"):
            NIXLTransport()
    finally:
        library._library.cache_clear()


def test_it_is_a_built_in_transport() -> None:
    assert load_transport("nixl") is NIXLTransport
