"""TLS: which files this node has, when it needs them, and which peers are admitted.

Both sides show a certificate that the CA in `tls_ca` has signed, and both check the other's. All nodes are
equal: any certificate of that CA admits its holder, unless `tls_peer_names` narrows that down.

The files are read again when they change, at the next connection. Connections that exist go on with what they
began with. If the new files cannot be used, for example because only one of them has been replaced yet, the
old ones stay in use.
"""

from __future__ import annotations

import contextlib
import logging
import ssl
from dataclasses import dataclass
from typing import Any, Final

from ..errors import ConfigurationError, PeerRefusedError
from ..limited_log import LimitedLog
from ..network import is_loopback
from ..tls_files import load_ca, load_chain, reason_of, require_readable, versions_of
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
            ConfigurationError: TLS is needed but not configured, or plaintext is configured where it is not
                allowed.
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
            PeerRefusedError: this node does not allow plaintext, or has no certificate. Nothing was sent to
                the peer.
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
        """The contexts for the next connection, from the files as they are now.

        Only for nodes with certificates.
        """
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
        """Check the names in a verified certificate.

        Raises PeerRefusedError: it has none of `tls_peer_names`.
        """
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
    return versions_of(getattr(options, key) for key in _FILE_KEYS)


def load_contexts(options: TcpOptions) -> Contexts:
    """Read the files, and check that a peer with the same CA would admit this node.

    Raises:
        ConfigurationError: a file cannot be read or is malformed, the key is not the certificate's, or the CA
            does not verify the certificate, for example because it has expired.
    """
    for key in _FILE_KEYS:
        require_readable(key, getattr(options, key), is_secret=key == "tls_key")
    contexts = Contexts(
        _context(ssl.PROTOCOL_TLS_SERVER, options),
        _context(ssl.PROTOCOL_TLS_CLIENT, options),
    )
    _require_own_admission(contexts, options)
    return contexts


def _context(protocol: ssl._SSLMethod, options: TcpOptions) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode, context.check_hostname = ssl.CERT_REQUIRED, False
    if protocol == ssl.PROTOCOL_TLS_CLIENT:
        context.check_hostname = options.tls_verify_host
    else:
        context.num_tickets = 0  # no session is resumed, so each connection checks the certificates
    load_ca(context, "tls_ca", options.tls_ca)
    load_chain(context, "tls_cert", options.tls_cert, "tls_key", options.tls_key)
    return context


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
            f"cannot use tls_cert={options.tls_cert!r}: {reason_of(error)}",
            key="tls_cert",
            value=options.tls_cert,
        ) from error
    finally:
        contexts.connect.check_hostname = was_checked
