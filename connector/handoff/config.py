"""Deadlines and bounds of the handoff protocol."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from ...transports.checked import integer, seconds
from ...transports.errors import ConfigurationError
from ...transports.options import INTERNAL, require_valid

Seconds = Annotated[float, seconds()]
Count = Annotated[int, integer(1)]


#: Longest time between two heartbeats of a consumer, so that a long lease of its own does not cost it a short
#: one of a producer.
_MAX_HEARTBEAT_S = 5.0


# Users choose how long blocks stay reserved and how long a request may wait: that follows from what they
# know, which is the load, the network and the patience of clients. `max_peer_ranks` follows from the size of
# their nodes. The other fields are internal: they bound the protocol's retries and what it remembers, and no
# load or network asks for another value.
@dataclass(frozen=True)
class HandoffConfig:
    """Deadlines and bounds of the handoff protocol.

    Attributes:
        lease_s: A producer keeps an offer for this long after its consumer was last heard. A consumer renews
            its leases after a sixth of its own `lease_s`, and at least every 5 s, so set the same value on
            both.
        max_hold_s: Longest time for which a producer renews the lease of a finished request, however often
            its consumer asks for that. Must be more than a consumer's `load_wait_s`.
        connect_timeout_s: On the consumer's side, from the decision to connect to the end of the handshake;
            on the producer's side, from a connection to its first message.
        claim_timeout_s: From a claim, or the producer's last message about it, to the next message. A
            producer whose request still runs sends one at least three times in this period, so a claim waits
            while the producer lives.
        load_wait_s: A consumer holds a granted offer for this long without blocks to load it into.
        progress_wait_s: A consumer that has blocks waits this long for the producer's next message about an
            offer that is still being computed: its next part, or that its request still runs. In a rendezvous
            it gives its blocks up after this time if no part has come and another load has waited for blocks
            as long.
        read_timeout_s: Longest time for a read of one request's blocks.
        backoff_s: After a connection failed, its address is not tried for this long; doubled with each
            further failure.
        max_backoff_s: Longest backoff.
        max_failed_claims: Failures that a consumer remembers until their loads are asked for.
        rendezvous_wait_s: In a rendezvous, a producer keeps a claim for this long without the request that it
            is about.
        max_rendezvous: Such claims that a producer keeps at once, and names of past rendezvous that it
            remembers. Further claims are denied.
        max_peer_ranks: Ranks of a producer. An offer with more addresses is refused, because anyone who can
            send a request can write addresses. Raise it if a node really has more ranks.
        max_connecting: Connections that a consumer has in progress at once. Further ones wait, within
            `connect_timeout_s`. If the limit of open files is low, one per 32 descriptors of that limit are
            in progress.

    Raises:
        ConfigurationError: a value is not positive or not finite, or two of them do not fit together.
    """

    lease_s: Seconds = 30.0
    max_hold_s: Seconds = 600.0
    connect_timeout_s: Seconds = 5.0
    claim_timeout_s: Seconds = 10.0
    load_wait_s: Seconds = 300.0
    progress_wait_s: Seconds = field(default=30.0, metadata=INTERNAL)
    read_timeout_s: Seconds = 30.0
    backoff_s: Seconds = field(default=0.1, metadata=INTERNAL)
    max_backoff_s: Seconds = field(default=2.0, metadata=INTERNAL)
    max_failed_claims: Count = field(default=4096, metadata=INTERNAL)
    rendezvous_wait_s: Seconds = 30.0
    max_rendezvous: Count = field(default=4096, metadata=INTERNAL)
    max_peer_ranks: Count = 64
    max_connecting: Count = field(default=32, metadata=INTERNAL)

    def __post_init__(self) -> None:
        require_valid(self)
        if self.max_backoff_s < self.backoff_s:
            raise ConfigurationError(
                f"max_backoff_s={self.max_backoff_s} must be at least backoff_s={self.backoff_s}",
                key="max_backoff_s",
                value=self.max_backoff_s,
            )

    @property
    def heartbeat_s(self) -> float:
        """How often a consumer renews its leases."""
        return min(_MAX_HEARTBEAT_S, self.lease_s / 6)
