"""How long the handoff protocol waits for what."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ...transports.errors import ConfigurationError


@dataclass(frozen=True)
class HandoffConfig:
    """Deadlines and bounds of the handoff protocol.

    Attributes:
        lease_s: A producer keeps an offer for this long after the last sign of life of its consumer.
        max_hold_s: A producer renews the lease of a finished request for no longer than this, whatever its consumer says;
            more than a consumer's `load_wait_s`.
        heartbeat_s: A consumer renews its leases this often; at most half of `lease_s`.
        connect_timeout_s: From the wish to connect to the end of the handshake, and on the producer's side
            from a connection to its first message.
        claim_timeout_s: From a claim, or the producer's last word about it, to the next word. A producer whose request
            still runs says so at least three times in this period, so a claim waits for as long as the producer lives.
        load_wait_s: A consumer holds a granted offer for this long without blocks to load it into.
        progress_wait_s: A consumer that has blocks waits for this long until more of an offer is ready that is still
            being computed.
        read_timeout_s: A read of one request's blocks.
        backoff_s: Rest of an address after a connection failed; doubled with each further failure.
        max_backoff_s: Longest rest.
        max_failed_claims: Failures that a consumer remembers until somebody asks for the load.
        max_peer_ranks: Ranks of a producer. An offer that names more addresses is refused, because anyone who can send
            a request can write addresses; raise it where a node really has more ranks.
        max_connecting: Connections that a consumer has in progress at once. Further ones wait for their turn, within
            `connect_timeout_s`. A node that may open few files has fewer: one for every 32 descriptors of its limit.

    Raises:
        ConfigurationError: a value is not positive or not finite, or two of them do not fit together.
    """

    lease_s: float = 30.0
    max_hold_s: float = 600.0
    heartbeat_s: float = 5.0
    connect_timeout_s: float = 5.0
    claim_timeout_s: float = 10.0
    load_wait_s: float = 300.0
    progress_wait_s: float = 30.0
    read_timeout_s: float = 30.0
    backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    max_failed_claims: int = 4096
    max_peer_ranks: int = 64
    max_connecting: int = 32

    def __post_init__(self) -> None:
        for setting in fields(self):
            self._require_positive(setting.name)
        if self.heartbeat_s > self.lease_s / 2:
            raise ConfigurationError(
                f"heartbeat_s={self.heartbeat_s} is more than half of lease_s={self.lease_s}",
                key="heartbeat_s",
                value=self.heartbeat_s,
            )
        if self.max_backoff_s < self.backoff_s:
            raise ConfigurationError(
                f"max_backoff_s={self.max_backoff_s} is less than backoff_s={self.backoff_s}",
                key="max_backoff_s",
                value=self.max_backoff_s,
            )

    def _require_positive(self, key: str) -> None:
        value = getattr(self, key)
        whole = key.startswith("max_") and not key.endswith("_s")
        allowed = (int,) if whole else (int, float)
        if type(value) not in allowed or not math.isfinite(value) or value <= 0:
            kind = "a positive integer" if whole else "a positive number of seconds"
            raise ConfigurationError(f"{key}={value!r}: it must be {kind}", key=key, value=value)
