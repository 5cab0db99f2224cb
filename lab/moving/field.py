"""The contenders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from . import others
from .contender import Contender
from .ends import contender_of
from .paths import Path

MEMCPY = "memcpy"
SOCKETS = "plain sockets"

#: Timeouts for processes that are stopped while others are measured.
_PATIENT = {"handshake_timeout_s": 3600}
_PATIENT_OVER_NETWORK = {**_PATIENT, "peer_timeout_s": 3600}


#: What must be installed for a transport, if it is not a part of kvferry's own requirements.
_DISTRIBUTIONS = {"ucx": "ucxx-cu12", "nixl": others.NIXL}


def ours(
    name: str,
    scheme: str,
    options: Mapping[str, Any],
    *,
    in_arena: bool = True,
    twin: str = "",
) -> Contender:
    """One of kvferry's transports with some options.

    Args:
        in_arena: Whether the transport allocates the pools.
        twin: The contender whose speed it is compared with.
    """
    patient = _PATIENT if scheme == "shm" else _PATIENT_OVER_NETWORK
    path = Path(name, scheme, {**patient, **options}, "arena" if in_arena else "ordinary")
    return replace(contender_of(path), distribution=_DISTRIBUTIONS.get(scheme, ""), twin=twin)


def memcpy() -> Contender:
    """The baseline of all."""
    return Contender(MEMCPY, others.own_nothing, others.MemcpyReader)


def nixl_pair(tls: str) -> tuple[Contender, Contender]:
    """NIXL alone, and the transport `nixl`, over the same UCX transports."""
    alone, name = f"NIXL, {tls}", f"kvferry nixl, {tls}"
    # What the transport sets for itself. `cma` is what UCX chooses between two processes of one host if TCP
    # is out.
    environment = {
        "NIXL_LOG_LEVEL": "FATAL",
        "UCX_LOG_LEVEL": "FATAL",
        "UCX_TLS": "^tcp" if tls == "cma" else tls,
        "UCX_NET_DEVICES": "lo",
    }
    options = {"tls": environment["UCX_TLS"], "net_devices": "lo", "refuse_tcp": tls != "tcp"}
    # UCX has no failure handling over shared memory and cma.
    mode = {"error_handling": "none" if tls == "cma" else "peer"}
    return (
        Contender(alone, others.own_nixl, others.NixlReader, mode, others.NIXL, environment),
        replace(ours(name, "nixl", options, twin=alone), environment=environment),
    )


def all_contenders(secret_file: FilePath, certificates: FilePath) -> list[Contender]:
    """Return every contender, installed or not.

    Args:
        secret_file: Secret for both ends of an encrypted connection.
        certificates: Folder with `ca.pem`, `node.pem` and `node.key`, for both ends of a connection with TLS.
    """
    curve = {"curve": "on", "shared_secret_file": str(secret_file)}
    files = {"tls_cert": "node.pem", "tls_key": "node.key", "tls_ca": "ca.pem"}
    tls = {"tls": "on", **{key: str(certificates / name) for key, name in files.items()}}
    return [
        memcpy(),
        Contender(SOCKETS, others.own_sockets, others.SocketReader, {}),
        ours("kvferry shm", "shm", {}, twin="NIXL, cma"),
        ours("kvferry shm, no arena", "shm", {}, in_arena=False),
        ours("kvferry shm, 1 thread", "shm", {"copy_threads": 1}),
        ours("kvferry tcp, unchecked", "tcp", {"checksums": False}, twin=SOCKETS),
        ours("kvferry tcp", "tcp", {}, twin=SOCKETS),
        ours("kvferry tcp, TLS", "tcp", tls, twin="kvferry zeromq, CURVE"),
        ours("kvferry zeromq, unchecked", "zeromq", {"checksums": False}, twin=SOCKETS),
        ours("kvferry zeromq", "zeromq", {}, twin=SOCKETS),
        ours("kvferry zeromq, CURVE", "zeromq", curve, twin=SOCKETS),
        ours("kvferry ucx, tcp", "ucx", {"tls": "tcp"}, twin="NIXL, tcp"),
        *nixl_pair("cma"),
        *nixl_pair("tcp"),
        Contender(
            "Mooncake, tcp",
            others.own_mooncake,
            others.MooncakeReader,
            {},
            "mooncake-transfer-engine-non-cuda",
        ),
    ]
