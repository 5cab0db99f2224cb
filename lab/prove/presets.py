"""Connectors by name: their `kv_transfer_config` for each side, and what the kit must know to try them.

This module is pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvferry.router.http.files import text_of
from kvferry.transports.checked import Refused, json_of
from kvferry.transports.errors import ConfigurationError

SIDES: Final = ("prefill", "decode", "stranger")
#: The servers that the options name. `alone` has no connector.
SERVERS: Final = ("prefill", "decode", "alone")

#: In a configuration of the user these are replaced by the name of the side, a port that it keeps, and a
#: folder that all share.
PLACEHOLDERS: Final = ("{side}", "{port}", "{folder}")
#: Placeholder, without braces → what takes its place on one side.
Places = Mapping[str, str | int]


#: What a prefill server is asked for, beside what the client wants: the keys of vLLM's own examples of a
#: proxy.
OFFER: Final[Mapping[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class Beside:
    """A server of the connector's own that all sides use.

    Attributes:
        command: Its arguments after the interpreter, with `{port}` and `{http_port}`. In a configuration its
            `{port}` is `{beside_port}`.
        ready_path: It is ready as soon as it answers this path with 200.
    """

    command: tuple[str, ...]
    ready_path: str


@dataclass(frozen=True)
class Connector:
    """A connector to try.

    Attributes:
        transfer: vLLM's `kv_transfer_config`, or `ec_transfer_config` if it `encodes`, with `PLACEHOLDERS`.
        takes_params: Whether the decode server needs `kv_transfer_params`. If not, it finds the cache by the
            prompt.
        offer: What the prefill server is asked for, with `{request_id}`.
        load: What the decode server is asked with, with `{request_id}` and `{prefill_port}`, the prefill
            server's `{port}`. Empty: what the prefill server answered.
        lease_s: After so many seconds the prefill server must have given up blocks that no server fetched.
        environment: Variables for the servers, with `PLACEHOLDERS`.
        needs: A module that the servers must be able to import.
        beside: Is started before the servers, and no fault touches it.
        encodes: It hands over what an encoder computed from an image. Then the prefill server is an encoder
            and computes no answer, each prompt has an image of its own, and the decode server computes the
            prompt.
        about: What it is, in one line.
    """

    name: str
    transfer: Mapping[str, Any]
    takes_params: bool = True
    offer: Mapping[str, Any] = field(default_factory=lambda: OFFER)
    load: Mapping[str, Any] = field(default_factory=dict)
    lease_s: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: str = ""
    about: str = ""
    beside: Beside | None = None
    encodes: bool = False

    @property
    def option(self) -> str:
        """The option of vLLM that takes the configuration."""
        return "--ec-transfer-config" if self.encodes else "--kv-transfer-config"

    def transfer_of(self, places: Places, policy: str) -> dict[str, Any]:
        """Return the configuration of one side."""
        side = places["side"]
        filled: dict[str, Any] = with_places(self.transfer, places)
        if self.encodes:
            return {**filled, "ec_role": "ec_consumer" if side == "decode" else "ec_producer"}
        return {**filled, "kv_load_failure_policy": policy}

    def environment_of(self, places: Places) -> dict[str, str]:
        """Return the variables of one side."""
        return {name: str(with_places(value, places)) for name, value in self.environment.items()}


def with_places(value: Any, places: Places) -> Any:
    """Fill placeholders. A text that is one, and nothing else, becomes a number if its place has a number."""
    if isinstance(value, Mapping):
        return {key: with_places(each, places) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [with_places(each, places) for each in value]
    if isinstance(value, str):
        for name, found in places.items():
            if value == f"{{{name}}}":
                return found
            value = value.replace(f"{{{name}}}", str(found))
    return value


#: Short, because the kit waits until they are over. With the defaults every row works as well, and takes
#: longer.
_LEASE_S: Final = 3
_KVFERRY_TIMES: Final = {"lease_s": _LEASE_S, "connect_timeout_s": 2, "claim_timeout_s": 2}
#: NixlConnector renews leases every sixth of their time, in whole seconds.
_NIXL_LEASE_S: Final = 6
_NIXL_ENVIRONMENT: Final = {
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "{port}",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
}


def _kvferry(transport: str, **options: object) -> dict[str, Any]:
    return {
        "kv_connector": "KvferryConnector",
        "kv_connector_module_path": "kvferry.connector.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"transport": transport, **_KVFERRY_TIMES, **options},
    }


def _kvferry_encoder(transport: str, **options: object) -> dict[str, Any]:
    return {
        "ec_connector": "KvferryEncoderConnector",
        "ec_connector_module_path": "kvferry.connector.vllm",
        # So small that other images can take the place of all that were offered.
        "ec_connector_extra_config": {"transport": transport, "pool_mb": 2, **_KVFERRY_TIMES, **options},
    }


def _nixl(connector: str) -> dict[str, Any]:
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"kv_lease_duration": _NIXL_LEASE_S},
    }


def _offloading(**options: object) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": 1 << 28,
            "spec_name": "HostMemorySpec",
            "spec_module_path": "kvferry.connector.testing.host_memory",
            **options,
        },
    }


def _beside_offloading(first: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [dict(first), _offloading()]},
    }


#: Its servers agree on names of chunks only if their interpreters hash alike.
_LMCACHE_ENVIRONMENT: Final = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}
_LMCACHE_SERVER: Final = Beside(
    (
        *("-m", "lmcache.v1.multiprocess.http_server"),
        *("--host", "127.0.0.1", "--port", "{port}", "--http-port", "{http_port}"),
        *("--chunk-size", "32", "--l1-size-gb", "0.5", "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "auto", "--disable-observability"),
    ),
    "/healthcheck",
)
_P2P_TIER: Final = {
    "type": "p2p",
    "host": "127.0.0.1",
    "port": "{port}",
    "unbound_store_timeout_s": _LEASE_S,
}
_NETWORK: Final = {"transport_options": {"bind_host": "127.0.0.1", "port": "{port}"}}
_SHM: Final = _kvferry("shm", address="shm://@kvferry-prove-{port}")

PRESETS: Final[Mapping[str, Connector]] = {
    each.name: each
    for each in (
        Connector("shm", _SHM, lease_s=_LEASE_S, about="kvferry over shared memory"),
        Connector("tcp", _kvferry("tcp", **_NETWORK), lease_s=_LEASE_S, about="kvferry over TCP"),
        Connector("zeromq", _kvferry("zeromq", **_NETWORK), lease_s=_LEASE_S, about="kvferry over ZeroMQ"),
        Connector("ucx", _kvferry("ucx"), lease_s=_LEASE_S, needs="ucxx", about="kvferry over UCX"),
        Connector(
            "kvferry-nixl", _kvferry("nixl"), lease_s=_LEASE_S, needs="nixl_cu12", about="kvferry over NIXL"
        ),
        Connector(
            "encoder-shm",
            _kvferry_encoder("shm", address="shm://@kvferry-prove-{port}"),
            lease_s=_LEASE_S,
            about="kvferry's connector of encoder outputs over shared memory: an encoder apart",
            encodes=True,
        ),
        Connector(
            "encoder-tcp",
            _kvferry_encoder("tcp", **_NETWORK),
            lease_s=_LEASE_S,
            about="kvferry's connector of encoder outputs over TCP: an encoder apart",
            encodes=True,
        ),
        Connector(
            "nixl",
            _nixl("NixlConnector"),
            lease_s=_NIXL_LEASE_S,
            environment=_NIXL_ENVIRONMENT,
            needs="nixl",
            about="vLLM's NixlConnector: the decode server reads",
        ),
        Connector(
            "nixl-push",
            _nixl("NixlPushConnector"),
            lease_s=_NIXL_LEASE_S,
            environment=_NIXL_ENVIRONMENT,
            needs="nixl",
            about="vLLM's NixlPushConnector: the prefill server writes",
        ),
        Connector(
            "example",
            {
                "kv_connector": "ExampleConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"shared_storage_path": "{folder}"},
            },
            takes_params=False,
            about="vLLM's ExampleConnector: files in a shared folder",
        ),
        Connector(
            "lmcache",
            {
                "kv_connector": "LMCacheMPConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "lmcache.mp.host": "tcp://127.0.0.1",
                    "lmcache.mp.port": "{beside_port}",
                },
            },
            takes_params=False,
            environment=_LMCACHE_ENVIRONMENT,
            needs="lmcache",
            about="LMCache, with its server of its own beside: the decode server finds caches by the prompt",
            beside=_LMCACHE_SERVER,
        ),
        Connector(
            "shm+offloading",
            _beside_offloading(_SHM),
            lease_s=_LEASE_S,
            about="kvferry over shared memory, and vLLM's OffloadingConnector, in a MultiConnector",
        ),
        Connector(
            "nixl+offloading",
            _beside_offloading(_nixl("NixlConnector")),
            lease_s=_NIXL_LEASE_S,
            environment=_NIXL_ENVIRONMENT,
            needs="nixl",
            about="vLLM's NixlConnector and OffloadingConnector in a MultiConnector",
        ),
        Connector(
            "p2p",
            _offloading(secondary_tiers=[_P2P_TIER]),
            offer={"remote_decoder": {"kv_request_id": "{request_id}"}},
            load={
                "remote_prefiller": {
                    "kv_request_id": "{request_id}",
                    "remote_host": "127.0.0.1",
                    "remote_port": "{prefill_port}",
                }
            },
            lease_s=_LEASE_S,
            environment={"PYTHONHASHSEED": "0"},  # names of chunks must be alike on both sides
            needs="nixl",
            about="vLLM's OffloadingConnector with its P2P tier: the decode server fetches from the prefill server's main memory",
        ),
    )
}


def connector_of(preset: str, transfer: str, lease_s: float | None, takes_params: bool | None) -> Connector:
    """Return the connector that the options name.

    Args:
        preset: A name of `PRESETS`; not used if `transfer` is given.
        transfer: A `kv_transfer_config` or `ec_transfer_config` as JSON, or a file that holds one after `@`;
            empty: the preset.
        lease_s: Instead of the preset's.
        takes_params: Instead of the preset's.

    Raises:
        ConfigurationError: the preset is unknown, or the JSON is malformed.
    """
    if transfer:
        found = _custom(transfer)
    elif preset in PRESETS:
        found = PRESETS[preset]
    else:
        raise ConfigurationError(
            f"--preset must be one of {', '.join(PRESETS)}; got {preset!r}; give another connector with --transfer-config",
            key="--preset",
            value=preset,
        )
    return replace(
        found,
        takes_params=found.takes_params if takes_params is None else takes_params,
        lease_s=found.lease_s if lease_s is None else lease_s,
    )


def _custom(text: str) -> Connector:
    key = "--transfer-config"
    try:
        if text.startswith("@"):
            text = text_of(text[1:])
        found = json_of(text)
    except (OSError, UnicodeDecodeError, Refused) as error:
        raise ConfigurationError(
            f"{key} must be JSON, or @FILE with JSON: {str(error).strip()}; got {text[:100]!r}",
            key=key,
            value=text,
        ) from error
    for name in ("kv_connector", "ec_connector"):
        if isinstance(found, dict) and isinstance(connector := found.get(name), str):
            about = "given by --transfer-config"
            return Connector(connector, found, lease_s=30.0, about=about, encodes=name == "ec_connector")
    raise ConfigurationError(
        f"{key} must be an object with kv_connector, as vLLM's --kv-transfer-config, or with ec_connector, as its "
        f"--ec-transfer-config; got {text[:100]!r}",
        key=key,
        value=text,
    )
