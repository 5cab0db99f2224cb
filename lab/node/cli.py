"""The command line of a node."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...connector.config import KVRole, KVTransferConfig
from ...router.http.access import Access
from ...router.http.admin import Admin, add_admin_arguments, admin_of
from ...router.http.connections import ConnectionLimits
from ...router.http.logs import LogFormat
from ...router.http.serving import (
    StartupError,
    add_drain_arguments,
    add_serving_arguments,
    checked_access,
    limits_of,
)
from ...transports.checked import Refused, json_of, shown
from ...transports.errors import ConfigurationError
from ...transports.registry import BUILT_IN
from ..engine.settings import EngineSettings
from .options import DEFAULT_CONNECTOR, add_option, connector_options

ROLES: dict[str, KVRole] = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
SINGLE = "single"
#: Default port of each role. A single node takes the router's port, because it replaces the router for its
#: clients.
DEFAULT_PORTS: dict[str, int] = {
    "prefill": 8100, "both": 8100, "decode": 8200, SINGLE: 8000,
    "kv_producer": 8100, "kv_both": 8100, "kv_consumer": 8200,
}  # fmt: skip

EPILOG = """
A pair by hand, in three terminals:
  kvferry serve --role prefill
  kvferry serve --role decode
  kvferry router --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
"""


@dataclass(frozen=True)
class NodeOptions:
    """Hold the values of the command line.

    Attributes:
        role: `prefill`, `decode`, `both` or `single`, for logs.
        drain_delay_s: Seconds for which a drain still accepts requests.
        drain_timeout_s: Seconds to finish answers and to deliver offers after a signal to stop.
        limits: Limits on clients.
        access: What clients must present.
        admin: The bound listener of the admin endpoints. None: there are none.
        log_format: `text` or `json`.
        otlp_traces_endpoint: Where spans are sent; empty takes the one of the environment.
    """

    role: str
    settings: EngineSettings
    host: str
    port: int
    log_level: str
    drain_delay_s: float
    drain_timeout_s: float
    limits: ConnectionLimits
    access: Access
    admin: Admin | None
    log_format: LogFormat
    otlp_traces_endpoint: str


def parse_arguments(arguments: Sequence[str] | None = None, program: str = "kvferry serve") -> NodeOptions:
    """Read the command line of a program of this name.

    Raises:
        StartupError: options contradict each other, or a value cannot work.
        SystemExit: argparse has printed what the user asked for or did wrong, e.g. after `--help`.
    """
    parser = argparse.ArgumentParser(prog=program, allow_abbrev=False)
    configure(parser)
    return options_of(parser.parse_args(arguments))


def options_of(options: argparse.Namespace) -> NodeOptions:
    """Check what a parser with these options has read.

    Raises:
        StartupError: options contradict each other, or a value cannot work.
    """
    try:
        kv_transfer = _kv_transfer(options)
        settings = _settings(options, kv_transfer)
    except ConfigurationError as error:
        raise StartupError(str(error)) from None
    role = options.role or (kv_transfer.kv_role if kv_transfer else SINGLE)
    for name in ("drain_timeout_s", "drain_delay_s"):
        value = getattr(options, name)
        if not 0 <= value < math.inf:
            raise StartupError(f"--{name.replace('_', '-')} {value:g}: it must be 0 or more")
    limits = limits_of(options, descriptors_each=1)
    access = checked_access(options)
    port = DEFAULT_PORTS[role] if options.port is None else options.port
    return NodeOptions(
        role,
        settings,
        options.host,
        port,
        options.log_level,
        options.drain_delay_s,
        options.drain_timeout_s,
        limits,
        access,
        admin_of(options, access.tls),
        options.log_format,
        options.otlp_traces_endpoint,
    )


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a node."""
    parser.description = (
        "Serve a model over an OpenAI-compatible API, as one node of a prefill/decode pair or alone."
    )
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_serving_arguments(
        parser, port=None, port_default="8100 for --role prefill or both, 8200 for decode, 8000 for single"
    )
    add_admin_arguments(parser)
    stopping = parser.add_argument_group("stopping")
    add_drain_arguments(stopping)
    stopping.add_argument(
        "--drain-timeout-s",
        type=float,
        default=30.0,
        metavar="S",
        help="time in seconds to finish answers and to deliver offers after SIGTERM or SIGINT; what is left then ends as "
        "aborted, and a second signal ends the node at once (default: %(default)g)",
    )
    _add_transfer_arguments(parser.add_argument_group("KV cache transfer"))
    model = parser.add_argument_group("model")
    _add_model_arguments(model)
    _add_compute_arguments(model)
    _add_cache_arguments(parser.add_argument_group("KV cache"))
    _add_batch_arguments(parser.add_argument_group("batches"))


def _add_transfer_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--role",
        choices=(*ROLES, SINGLE),
        help="prefill offers KV caches, decode loads them, both does either as each request asks, "
        "single transfers nothing (default: single)",
    )
    for name in ("connector", "connector-module", "connector-option", "load-failure-policy"):
        add_option(group, name)
    group.add_argument(
        "--kv-transfer-config",
        metavar="JSON",
        help="the options above as one JSON object with vLLM's names; excludes them",
    )


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    add_option(group, "model")
    group.add_argument(
        "--served-model-name", default="", help="name of the model for clients (default: the folder's name)"
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        default=0,
        metavar="N",
        help="limit of prompt and answer together, in tokens; 0 is the length that the model was trained for (default: 0)",
    )


def _add_compute_arguments(group: argparse._ArgumentGroup) -> None:
    for name in ("dtype", "device", "threads", "tensor-parallel-size"):
        add_option(group, name)


def _add_cache_arguments(group: argparse._ArgumentGroup) -> None:
    for name in ("layout", "block-size", "num-blocks"):
        add_option(group, name)
    group.add_argument(
        "--memory-utilization",
        type=float,
        default=0.1,
        metavar="SHARE",
        help="share of the memory for the pool if --num-blocks is 0 (default: %(default)s)",
    )
    group.add_argument(
        "--no-prefix-caching", action="store_true", help="do not reuse blocks of finished requests"
    )
    group.add_argument(
        "--kv-events",
        type=_endpoint,
        default="",
        metavar="[HOST:]PORT",
        help="publish what the prefix cache stores and removes there, in the format of vLLM's KV events; PORT 0 takes a free one, and "
        "routers learn it from /ready. The token ids of all prompts are readable there by anyone who can connect; HOST is "
        "127.0.0.1 unless given (default: nothing is published)",
    )


def _add_batch_arguments(group: argparse._ArgumentGroup) -> None:
    add_option(group, "max-num-batched-tokens")
    group.add_argument(
        "--max-num-seqs",
        type=int,
        default=16,
        metavar="N",
        help="most requests per step (default: %(default)s)",
    )


def _endpoint(text: str) -> str:
    if not text:
        return ""  # the default
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not [HOST:]PORT")
    return f"tcp://{host or '127.0.0.1'}:{port}"


def _settings(options: argparse.Namespace, kv_transfer: KVTransferConfig | None) -> EngineSettings:
    return EngineSettings(
        model=options.model,
        served_model_name=options.served_model_name,
        dtype=options.dtype,
        device=options.device,
        layout=options.layout,
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        memory_utilization=options.memory_utilization,
        max_model_len=options.max_model_len,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_num_seqs=options.max_num_seqs,
        enable_prefix_caching=not options.no_prefix_caching,
        num_threads=options.threads,
        tensor_parallel_size=options.tensor_parallel_size,
        kv_events_endpoint=options.kv_events,
        kv_transfer=kv_transfer,
    )


def _kv_transfer(options: argparse.Namespace) -> KVTransferConfig | None:
    """Read the connector's configuration from either form of its options; None for a single node."""
    short = {
        "--connector": options.connector,
        "--connector-module": options.connector_module,
        "--connector-option": options.connector_option,
        "--load-failure-policy": options.load_failure_policy,
    }
    given = [name for name, value in short.items() if value]
    if options.kv_transfer_config is not None:
        if given or options.role:
            raise StartupError(f"--kv-transfer-config and {(given or ['--role'])[0]} exclude each other")
        return KVTransferConfig.from_mapping(_json_object(options.kv_transfer_config))
    if options.role in (None, SINGLE):
        if given:
            raise StartupError(f"{given[0]} needs --role prefill, decode or both")
        return None
    connector = options.connector or DEFAULT_CONNECTOR
    return KVTransferConfig(
        kv_connector=connector,
        kv_role=ROLES[options.role],
        kv_connector_module_path=options.connector_module or "",
        # `kvferry explain` shows what it traces. Other connectors may not know the option.
        kv_connector_extra_config={
            **({"trace": True} if connector in BUILT_IN else {}),
            **connector_options(options.connector_option),
        },
        kv_load_failure_policy=options.load_failure_policy or "recompute",
    )


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json_of(text)
    except Refused as refused:
        raise StartupError(f"--kv-transfer-config {refused.why}; got {shown(text)}") from None
    if not isinstance(value, dict):
        raise StartupError(f"--kv-transfer-config must be a JSON object, got {shown(text)}")
    return value
