"""One node's identity, and its producer and consumer protocols."""

from __future__ import annotations

import pytest

from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.events import Identity
from kvferry.connector.handoff.messages import PROTOCOL_VERSION, Hello, Welcome
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.connector.planning import compatibility
from kvferry.connector.planning.layout import uniform_layout


@pytest.fixture
def config() -> HandoffConfig:
    return HandoffConfig(
        lease_s=30.0,
        connect_timeout_s=4.0,
        claim_timeout_s=10.0,
        load_wait_s=60.0,
        read_timeout_s=20.0,
        backoff_s=1.0,
        max_backoff_s=3.0,
        max_failed_claims=2,
    )


@pytest.fixture
def identity() -> Identity:
    fields: dict[str, str | int] = {"model": "m", "block_size": 4}
    layout = uniform_layout(["a", "b"], page_bytes=8, num_blocks=50, block_size=4, page_format="f")
    return Identity("here", 11, compatibility.digest(fields), fields, layout)


@pytest.fixture
def consumer(identity: Identity, config: HandoffConfig) -> ConsumerProtocol:
    return ConsumerProtocol(identity, config)


@pytest.fixture
def welcome(identity: Identity) -> Welcome:
    return Welcome(
        PROTOCOL_VERSION, "there", 22, identity.digest, identity.fields, identity.layout.to_plain()
    )


@pytest.fixture
def producer(identity: Identity, config: HandoffConfig) -> ProducerProtocol:
    """A producer with two guards, and two consumers, 1 and 2, that have sent their hello."""
    producer = ProducerProtocol(identity, config, num_guards=2)
    for peer in (1, 2):
        producer.peer_connected(peer, now=0.0)
        producer.receive(peer, Hello(PROTOCOL_VERSION, f"peer-{peer}", 5, "d"), now=0.0)
    return producer
