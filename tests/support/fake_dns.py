"""A resolver of DNS names that answers as a test says."""

from __future__ import annotations

import socket

from aiohttp.abc import AbstractResolver, ResolveResult


class Names(AbstractResolver):
    """Answers each question with `addresses`, or raises the error."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: tuple[str, ...] | OSError = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return [
            ResolveResult(hostname=host, host=address, port=port, family=family, proto=0, flags=0)
            for address in self.addresses
        ]

    async def close(self) -> None:
        return
