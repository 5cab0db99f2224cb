"""One node's identity, an offer of another node's, and a clock that stands still."""

from __future__ import annotations

import pytest

from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.handoff.events import Identity
from kvferry.connector.planning import compatibility
from kvferry.connector.planning.layout import uniform_layout


@pytest.fixture
def config() -> HandoffConfig:
    return HandoffConfig(
        lease_s=30.0,
        heartbeat_s=5.0,
        connect_timeout_s=4.0,
        claim_timeout_s=10.0,
        early_claim_wait_s=3.0,
        load_wait_s=60.0,
        read_timeout_s=20.0,
        backoff_s=1.0,
        max_backoff_s=3.0,
        max_early_claims=2,
        max_failed_claims=2,
    )


@pytest.fixture
def identity() -> Identity:
    fields: dict[str, str | int] = {"model": "m", "block_size": 4}
    layout = uniform_layout(["a", "b"], page_bytes=8, num_blocks=50, block_size=4, page_format="f")
    return Identity("here", 11, compatibility.digest(fields), fields, layout)
