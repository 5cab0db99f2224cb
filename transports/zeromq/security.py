"""CURVE keys: which ones this node has, when it needs them, and which peers may connect.

Both ways to configure keys give a key pair and the set of public keys that are allowed, in both directions.
With a shared secret all nodes have the same key pair, derived from the secret, and the set contains only its
public key. No secret is ever part of a message, a log line or a representation.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from ..errors import BackendUnavailableError, ConfigurationError, PeerRefusedError
from ..network import is_loopback
from .options import Address, ZeroMQOptions

ZAP_DOMAIN = b"kvferry"

_MIN_SECRET_BYTES = 16


@dataclass(frozen=True)
class CurveKeys:
    """This node's keys, and the public keys of its peers; each 40 bytes of Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed: frozenset[bytes] = field(repr=False)

    @property
    def public_bytes(self) -> bytes:
        """The public key as 32 bytes."""
        return z85.decode(self.public)

    def protect_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make a listening socket admit only authenticated peers."""
        socket.curve_server = True
        self._set(socket)
        socket.zap_domain = ZAP_DOMAIN
        # Without this libzmq would admit every peer if the handler were missing.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def protect_client(self, socket: zmq.Socket[bytes], server_key: bytes) -> None:
        """Make a connecting socket talk only to the node that holds `server_key` (32 bytes)."""
        socket.curve_serverkey = z85.encode(server_key)
        self._set(socket)

    def _set(self, socket: zmq.Socket[bytes]) -> None:
        socket.curve_publickey, socket.curve_secretkey = self.public, self.secret


class Security:
    """Decides whether a connection is encrypted, in plaintext, or refused."""

    def __init__(self, options: ZeroMQOptions) -> None:
        self._mode = options.curve
        self._allow_plaintext = options.allow_plaintext and options.curve == "off"
        self._keys = _load_keys(options)

    def for_listening(self, host: str) -> CurveKeys | None:
        """Return the keys to listen on `host` with; None means plaintext.

        Raises:
            ConfigurationError: keys are needed but not configured, or plaintext is configured where it is not
                allowed.
        """
        local = is_loopback(host)
        if self._mode == "on" or (self._mode == "auto" and not local):
            if self._keys is None:
                raise ConfigurationError(
                    f"cannot listen on {host}: that needs CURVE keys; set shared_secret_file, or curve_secret_key_file "
                    "and curve_allowed_keys_file, or, in a network that you trust, curve='off' and allow_plaintext=true",
                    key="curve",
                    value=self._mode,
                )
            return self._keys
        if not local and not self._allow_plaintext:
            raise ConfigurationError(
                f"cannot listen on {host} with curve='off': it is not loopback; set allow_plaintext=true as well",
                key="curve",
                value=self._mode,
            )
        return None

    def for_connecting(self, address: Address) -> CurveKeys | None:
        """Return the keys to connect to `address` with; None means plaintext.

        Raises:
            PeerRefusedError: this node does not allow the peer's key, or plaintext. Nothing was sent to the
                peer.
        """
        where = address.authority
        if not address.server_key:
            if self._mode == "on" or not (is_loopback(address.host) or self._allow_plaintext):
                raise PeerRefusedError(
                    f"refused to connect to {where}: it offers no encryption, and this node requires it (option curve)"
                )
            return None
        if self._mode == "off" or self._keys is None:
            raise PeerRefusedError(
                f"cannot connect to {where}: it requires CURVE, and this node has no keys or curve='off'"
            )
        if z85.encode(address.server_key) not in self._keys.allowed:
            raise PeerRefusedError(
                f"refused to connect to {where}: its CURVE key is not one that this node allows"
            )
        return self._keys


def _load_keys(options: ZeroMQOptions) -> CurveKeys | None:
    files = (options.curve_secret_key_file, options.curve_allowed_keys_file)
    if options.curve == "off" or not (options.shared_secret_file or any(files)):
        return None
    if not zmq.has("curve"):
        raise BackendUnavailableError(
            "cannot use CURVE keys: this libzmq was built without CURVE; install pyzmq's wheel from PyPI"
        )
    if options.shared_secret_file and any(files):
        raise ConfigurationError(
            "shared_secret_file and the CURVE key files exclude each other", key="shared_secret_file"
        )
    if options.shared_secret_file:
        return _derived_keys(_read("shared_secret_file", options.shared_secret_file))
    if not all(files):
        raise ConfigurationError(
            "curve_secret_key_file and curve_allowed_keys_file go together", key="curve_allowed_keys_file"
        )
    secret = _read("curve_secret_key_file", files[0])
    allowed = _without_comments(_read("curve_allowed_keys_file", files[1]).splitlines())
    for key, values in (("curve_secret_key_file", [secret]), ("curve_allowed_keys_file", allowed)):
        if not all(_is_key(value) for value in values):
            raise ConfigurationError(f"{key}: a key is 40 characters of Z85", key=key)
    return CurveKeys(zmq.curve_public(secret), secret, frozenset(allowed))


def _derived_keys(shared: bytes) -> CurveKeys:
    if len(shared) < _MIN_SECRET_BYTES:
        raise ConfigurationError(
            f"shared_secret_file: at least {_MIN_SECRET_BYTES} bytes, e.g. `openssl rand -hex 32`",
            key="shared_secret_file",
        )
    # Slow on purpose: an attacker sees the public key, and must not be able to try many secrets against it.
    raw = hashlib.scrypt(shared, salt=b"kvferry zeromq curve 1", n=1 << 14, r=8, p=1, dklen=32)
    secret = z85.encode(raw)
    public = zmq.curve_public(secret)
    return CurveKeys(public, secret, frozenset({public}))


def _read(key: str, name: str) -> bytes:
    try:
        with open(name, "rb") as file:
            if key != "curve_allowed_keys_file":
                _require_private(key, name, os.fstat(file.fileno()))
            return file.read().strip()
    except OSError as error:
        raise ConfigurationError(f"{key}: {error}", key=key, value=name) from error


def _require_private(key: str, name: str, status: os.stat_result) -> None:
    """Check that only this user and root can read or change a file.

    Raises:
        ConfigurationError: others can as well.
    """
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigurationError(
            f"{key}={name!r} belongs to user {status.st_uid}, which is neither this user nor root and knows the secret: "
            f"make a new secret, and `chown {os.geteuid()} {name}`",
            key=key,
            value=name,
        )
    if status.st_mode & 0o077:
        raise ConfigurationError(
            f"{key}={name!r} can be used by others than its owner (mode {status.st_mode & 0o777:03o}): "
            f"run `chmod 600 {name}`, and make a new secret if others have a login here",
            key=key,
            value=name,
        )


def _without_comments(lines: Iterable[bytes]) -> list[bytes]:
    # A comment must be a line of its own, because `#` is a digit of Z85.
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith(b"# ")]


def _is_key(value: bytes) -> bool:
    try:
        return len(value) == 40 and len(z85.decode(value)) == 32
    except (ValueError, KeyError):
        return False
