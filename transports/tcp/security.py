"""TLS: which files this node has, when it needs them, and which peers are admitted.

Both sides show a certificate that the CA in `tls_ca` has signed, and both check the other's. All nodes are equal: any
certificate of that CA admits its holder, unless `tls_peer_names` narrows that down.

The files are read again when they change, at the next connection. Connections that exist go on with what they began with.
If the new files cannot be used, for example because only one of them has been replaced yet, the old ones stay in use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
from dataclasses import dataclass
from typing import Any, Final

from .._limited_log import LimitedLog
from ..errors import ConfigurationError, PeerRefusedError
from ..network import is_loopback
from .options import Address, TcpOptions

logger = logging.getLogger(__name__)

_FILE_KEYS: Final = ("tls_cert", "tls_key", "tls_ca")


@dataclass(frozen=True)
class Contexts:
    """What connections are made with: as the side that accepts, and as the side that connects."""

    accept: ssl.SSLContext
    connect: ssl.SSLContext


class Security:
    """Decides whether a connection uses TLS, is in plaintext, or is refused.

    Raises:
        ConfigurationError: a file cannot be used; the error names its option.
    """

    def __init__(self, options: TcpOptions) -> None:
        self._options = options
        self._mode = options.tls
        self._allow_plaintext = options.allow_plaintext and options.tls == "off"
        self._peer_names = options.peer_names
        self._log = LimitedLog(logger)
        self._versions: object = None
        self._contexts: Contexts | None = None
        if options.tls != "off" and options.tls_cert:
            self._versions = _versions(options)
            self._contexts = load_contexts(options)

    def for_listening(self, host: str) -> bool:
        """Return whether to listen on `host` with TLS.

        Raises:
            ConfigurationError: TLS is needed but not configured, or plaintext is configured where it is not allowed.
        """
        local = is_loopback(host)
        if self._mode == "on" or (self._mode == "auto" and not local):
            if self._contexts is None:
                raise ConfigurationError(
                    f"cannot listen on {host}: that needs TLS; set tls_cert, tls_key and tls_ca, or, in a network that you "
                    "trust, tls='off' and allow_plaintext=true",
                    key="tls",
                    value=self._mode,
                )
            return True
        if not local and not self._allow_plaintext:
            raise ConfigurationError(
                f"cannot listen on {host} with tls='off': it is not loopback; set allow_plaintext=true as well",
                key="tls",
                value=self._mode,
            )
        return False

    def for_connecting(self, address: Address) -> bool:
        """Return whether to connect to `address` with TLS.

        Raises:
            PeerRefusedError: this node does not allow plaintext, or has no certificate. Nothing was sent to the peer.
        """
        where = address.authority
        if address.needs_tls:
            if self._contexts is None:
                raise PeerRefusedError(
                    f"cannot connect to {where}: it requires TLS; set tls_cert, tls_key and tls_ca, and do not set "
                    "tls='off'"
                )
            return True
        if self._mode == "on" or not (is_loopback(address.host) or self._allow_plaintext):
            raise PeerRefusedError(
                f"refused to connect to {where}: it offers no TLS, and this node requires it; set tls_cert, tls_key and "
                "tls_ca there, or, in a network that you trust, tls='off' and allow_plaintext=true on both nodes"
            )
        return False

    @property
    def contexts(self) -> Contexts:
        """The contexts for the next connection, from the files as they are now. Only for nodes with certificates."""
        assert self._contexts is not None, "the caller asked whether to use TLS"
        versions = _versions(self._options)
        if versions == self._versions:
            return self._contexts
        try:
            self._contexts = load_contexts(self._options)
            self._versions = versions
            logger.info("loaded the changed TLS files")
        except ConfigurationError as error:
            self._log.warning("cannot load the changed TLS files, the old ones stay in use: %s", error)
        return self._contexts

    def require_admitted(self, tls: ssl.SSLSocket) -> None:
        """Check the names in a verified certificate. Raises PeerRefusedError: it has none of `tls_peer_names`."""
        if not self._peer_names:
            return
        certificate: Any = tls.getpeercert() or {}
        names = [name for kind, name in certificate.get("subjectAltName", ()) if kind == "DNS"]
        if not any(_matches(name, wanted) for name in names for wanted in self._peer_names):
            raise PeerRefusedError(
                f"the peer's certificate names {names}, and tls_peer_names admits {list(self._peer_names)}"
            )


def _matches(name: str, wanted: str) -> bool:
    """Return whether a name is the wanted one; `*.` stands for one label."""
    name, wanted = name.lower(), wanted.lower()
    if wanted.startswith("*."):
        label, _, rest = name.partition(".")
        return bool(label) and rest == wanted[2:]
    return name == wanted


def _versions(options: TcpOptions) -> object:
    """Return something that changes whenever one of the files does."""
    return [_version(getattr(options, key)) for key in _FILE_KEYS]


def _version(name: str) -> object:
    try:
        state = os.stat(name)
    except (OSError, ValueError):  # loading it says why
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns


def load_contexts(options: TcpOptions) -> Contexts:
    """Read the files, and check that a peer with the same CA would admit this node.

    Raises:
        ConfigurationError: a file cannot be read or is malformed, the key is not the certificate's, or the CA does not
            verify the certificate, for example because it has expired.
    """
    for key in _FILE_KEYS:
        _require_readable(key, getattr(options, key))
    contexts = Contexts(
        _context(ssl.PROTOCOL_TLS_SERVER, options),
        _context(ssl.PROTOCOL_TLS_CLIENT, options),
    )
    _require_own_admission(contexts, options)
    return contexts


def _require_readable(key: str, name: str) -> None:
    try:
        with open(name, "rb") as file:
            file.read(1)
            mode = os.fstat(file.fileno()).st_mode
    except (OSError, ValueError) as error:  # ValueError: no path can be like that
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(
            f"cannot read {key}={name!r}: {reason}; is the path right, and may this user read it?",
            key=key,
            value=name,
        ) from error
    if key == "tls_key" and mode & 0o004:
        logger.warning("every user of this machine can read tls_key=%r; run `chmod 600 %s`", name, name)


def _context(protocol: ssl._SSLMethod, options: TcpOptions) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode, context.check_hostname = ssl.CERT_REQUIRED, False
    if protocol == ssl.PROTOCOL_TLS_CLIENT:
        context.check_hostname = options.tls_verify_host
    else:
        context.num_tickets = 0  # no session is resumed, so each connection checks the certificates
    try:
        context.load_verify_locations(cafile=options.tls_ca)
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"tls_ca={options.tls_ca!r} contains no certificate: {_reason(error)}; it must be a PEM file",
            key="tls_ca",
            value=options.tls_ca,
        ) from error
    try:
        # A password would be asked for on the terminal, where no one answers.
        context.load_cert_chain(options.tls_cert, options.tls_key, password=lambda: "")
    except ssl.SSLError as error:
        raise _chain_error(error, options) from error
    return context


def _chain_error(error: ssl.SSLError, options: TcpOptions) -> ConfigurationError:
    if error.reason == "KEY_VALUES_MISMATCH":
        return ConfigurationError(
            f"tls_key={options.tls_key!r} is not the key of the certificate in tls_cert={options.tls_cert!r}; set the key "
            "that the certificate was made with",
            key="tls_key",
            value=options.tls_key,
        )
    # OpenSSL does not say which of the two files it could not use. As a file of trusted certificates, the certificate
    # is read without its key.
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=options.tls_cert)
    except (OSError, ssl.SSLError) as certificate_error:
        return ConfigurationError(
            f"tls_cert={options.tls_cert!r} contains no certificate: {_reason(certificate_error)}; it must be a PEM file",
            key="tls_cert",
            value=options.tls_cert,
        )
    if (
        error.reason
    ):  # OpenSSL has read both files and does not want the certificate, for example because it is weak
        return ConfigurationError(
            f"cannot use tls_cert={options.tls_cert!r}: {_reason(error)}; have the CA sign a new certificate with a key "
            "of a usual kind, such as EC P-256",
            key="tls_cert",
            value=options.tls_cert,
        )
    return ConfigurationError(
        f"cannot read the key in tls_key={options.tls_key!r}: {_reason(error)}; it must be a PEM file, and not encrypted",
        key="tls_key",
        value=options.tls_key,
    )


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", None) or "it has no PEM block that can be read"
    return str(reason).lower().replace("_", " ")


def _require_own_admission(contexts: Contexts, options: TcpOptions) -> None:
    """Check by a handshake with ourselves, in memory, that our CA verifies our certificate on both sides.

    Raises:
        ConfigurationError: it does not. No peer with the same CA would admit this node.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    was_checked, contexts.connect.check_hostname = contexts.connect.check_hostname, False
    try:
        server = contexts.accept.wrap_bio(to_server, to_client, server_side=True)
        client = contexts.connect.wrap_bio(to_client, to_server)
        for side in (client, server, client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        raise ConfigurationError(
            f"the CA in tls_ca={options.tls_ca!r} does not verify tls_cert={options.tls_cert!r}: {error.verify_message}; "
            "have that CA sign a new certificate for this node, without extended key usages or with both serverAuth and "
            "clientAuth",
            key="tls_cert",
            value=options.tls_cert,
        ) from error
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"cannot use tls_cert={options.tls_cert!r}: {_reason(error)}",
            key="tls_cert",
            value=options.tls_cert,
        ) from error
    finally:
        contexts.connect.check_hostname = was_checked
