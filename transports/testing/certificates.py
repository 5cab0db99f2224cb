"""Certificates for tests and benchmarks, made with the command `openssl`."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Authority:
    """A CA whose files are in a folder.

    Attributes:
        pem: Its certificate.
    """

    folder: Path
    name: str = "ca"

    @property
    def pem(self) -> Path:
        return self.folder / f"{self.name}.pem"

    @property
    def _key(self) -> Path:
        return self.folder / f"{self.name}.key"

    @classmethod
    def make(cls, folder: Path, name: str = "ca") -> Authority:
        """Make a CA."""
        authority = cls(folder, name)
        _openssl(
            *("req", "-x509", *_NEW_KEY, "-days", "2", "-subj", f"/CN={name}"),
            *("-keyout", authority._key, "-out", authority.pem),
        )
        return authority

    def issue(self, node: str, *names: str, days: int = 1, usage: str = "") -> dict[str, str]:
        """Issue a certificate, and return the options of a node that has it.

        Args:
            names: Such as `"IP:127.0.0.1"`; by default this machine.
            days: Negative for one that has expired.
            usage: Extended key usages.
        """
        key, pem, request = (self.folder / f"{node}.{end}" for end in ("key", "pem", "csr"))
        extensions = self.folder / f"{node}.ext"
        lines = [f"subjectAltName={','.join(names or ('IP:127.0.0.1', 'IP:::1', 'DNS:localhost'))}"]
        extensions.write_text("\n".join([*lines, *([f"extendedKeyUsage={usage}"] if usage else [])]))
        _openssl("req", *_NEW_KEY, "-subj", f"/CN={node}", "-keyout", key, "-out", request)
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.pem, "-CAkey", self._key, "-CAcreateserial"),
            *("-days", days, "-extfile", extensions, "-out", pem),
        )
        return {"tls_cert": str(pem), "tls_key": str(key), "tls_ca": str(self.pem)}


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
