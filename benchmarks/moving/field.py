"""The contenders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .contender import Contender
from .memory import MemcpyReader, own_nothing
from .mooncake import MooncakeReader, own_mooncake
from .nixl import NixlReader, own_nixl
from .ours import OurReader, own_ours
from .sockets import SocketReader, own_sockets

MEMCPY = "memcpy"
SOCKETS = "plain sockets"

#: Timeouts for processes that are stopped while others are measured.
_PATIENT = {"handshake_timeout_s": 3600}
_PATIENT_OVER_NETWORK = {**_PATIENT, "peer_timeout_s": 3600}


def ours(
    name: str, scheme: str, options: Mapping[str, Any], *, in_arena: bool = True, is_patient: bool = True
) -> Contender:
    """One of kvferry's transports with some options.

    Args:
        is_patient: Whether its peers are not lost while their processes are stopped.
    """
    patient: Mapping[str, Any] = {}
    if is_patient:
        patient = _PATIENT if scheme == "shm" else _PATIENT_OVER_NETWORK
    described = {"scheme": scheme, "transport": {**patient, **options}, "in_arena": in_arena}
    return Contender(name, own_ours, OurReader, described, "ucxx-cu12" if scheme == "ucx" else "")


def _nixl(name: str, environment: Mapping[str, str]) -> Contender:
    quiet = {"NIXL_LOG_LEVEL": "FATAL", **environment}
    return Contender(name, own_nixl, NixlReader, distribution="nixl-cu12", environment=quiet)


def all_contenders(secret_file: Path, certificates: Path, congestion_control: str) -> list[Contender]:
    """Return every contender, installed or not.

    Args:
        secret_file: Secret for both ends of an encrypted connection.
        certificates: Folder with `ca.pem`, `node.pem` and `node.key`, for both ends of a connection with TLS.
        congestion_control: For every TCP connection on which it can be set; empty keeps the system's.
    """
    plain = {"congestion_control": congestion_control}
    curve = {**plain, "curve": "on", "shared_secret_file": str(secret_file)}
    files = {"tls_cert": "node.pem", "tls_key": "node.key", "tls_ca": "ca.pem"}
    tls = {**plain, "tls": "on", **{key: str(certificates / name) for key, name in files.items()}}
    return [
        Contender(MEMCPY, own_nothing, MemcpyReader),
        Contender(SOCKETS, own_sockets, SocketReader, plain),
        ours("kvferry shm", "shm", {}),
        ours("kvferry shm, no arena", "shm", {}, in_arena=False),
        ours("kvferry tcp, unchecked", "tcp", {**plain, "checksums": False}),
        ours("kvferry tcp", "tcp", plain),
        ours("kvferry tcp, TLS", "tcp", tls),
        ours("kvferry zeromq, unchecked", "zeromq", {**plain, "checksums": False}),
        ours("kvferry zeromq", "zeromq", plain),
        ours("kvferry zeromq, CURVE", "zeromq", curve),
        ours("kvferry ucx, tcp", "ucx", {"tls": "tcp"}),
        _nixl("NIXL, cma", {}),
        _nixl("NIXL, tcp", {"UCX_TLS": "tcp"}),
        Contender("Mooncake, tcp", own_mooncake, MooncakeReader, {}, "mooncake-transfer-engine-non-cuda"),
    ]
