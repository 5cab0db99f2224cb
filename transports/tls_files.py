"""TLS files: load certificates, keys and CAs with errors that name the option, and notice when a file has
changed.

A file's option is written in messages exactly as its user writes it: `tls_cert` for a transport,
`--ssl-certfile` for a server.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Iterable

from .errors import ConfigurationError

logger = logging.getLogger(__name__)


def versions_of(paths: Iterable[str]) -> object:
    """Return something that changes whenever one of the files does."""
    return [_version_of(path) for path in paths]


def _version_of(path: str) -> object:
    try:
        state = os.stat(path)
    except (OSError, ValueError):  # loading it says why
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns


def require_readable(option: str, path: str, *, is_secret: bool = False) -> None:
    """Check that a file can be read. Warn if it is secret and every user of the machine can read it.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            file.read(1)
            mode = os.fstat(file.fileno()).st_mode
    except (OSError, ValueError) as error:  # ValueError: no path can be like that
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(
            f"cannot read {option}={path!r}: {reason}; is the path right, and may this user read it?",
            key=option,
            value=path,
        ) from error
    if is_secret and mode & 0o004:
        logger.warning("every user of this machine can read %s=%r; run `chmod 600 %s`", option, path, path)


def load_ca(context: ssl.SSLContext, option: str, path: str) -> None:
    """Let a context trust the certificates in a file.

    Raises:
        ConfigurationError: the file contains none.
    """
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise ConfigurationError(
            f"{option}={path!r} contains no certificate: {reason_of(error)}; it must be a PEM file",
            key=option,
            value=path,
        ) from error


def load_chain(
    context: ssl.SSLContext, cert_option: str, cert_path: str, key_option: str, key_path: str
) -> None:
    """Let a context show the certificate in one file, with the key in another.

    Raises:
        ConfigurationError: a file is malformed, OpenSSL does not want the certificate, or the key is not the
            certificate's.
    """
    try:
        # A password would be asked for on the terminal, where no one answers.
        context.load_cert_chain(cert_path, key_path, password=lambda: "")
    except ssl.SSLError as error:
        raise _chain_error(error, cert_option, cert_path, key_option, key_path) from error


def _chain_error(
    error: ssl.SSLError, cert_option: str, cert_path: str, key_option: str, key_path: str
) -> ConfigurationError:
    if error.reason == "KEY_VALUES_MISMATCH":
        return ConfigurationError(
            f"{key_option}={key_path!r} is not the key of the certificate in {cert_option}={cert_path!r}; set the key "
            "that the certificate was made with",
            key=key_option,
            value=key_path,
        )
    # OpenSSL does not say which of the two files it could not use. As a file of trusted certificates, the
    # certificate is read without its key.
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=cert_path)
    except (OSError, ssl.SSLError) as certificate_error:
        return ConfigurationError(
            f"{cert_option}={cert_path!r} contains no certificate: {reason_of(certificate_error)}; it must be a PEM file",
            key=cert_option,
            value=cert_path,
        )
    if error.reason:  # OpenSSL has read both files and does not want the certificate, e.g. because it is weak
        return ConfigurationError(
            f"cannot use {cert_option}={cert_path!r}: {reason_of(error)}; have the CA sign a new certificate with a key "
            "of a usual kind, such as EC P-256",
            key=cert_option,
            value=cert_path,
        )
    return ConfigurationError(
        f"cannot read the key in {key_option}={key_path!r}: {reason_of(error)}; it must be a PEM file, and not encrypted",
        key=key_option,
        value=key_path,
    )


def reason_of(error: OSError) -> str:
    """Return OpenSSL's reason as words."""
    reason = getattr(error, "reason", None) or "it has no PEM block that can be read"
    return str(reason).lower().replace("_", " ")
