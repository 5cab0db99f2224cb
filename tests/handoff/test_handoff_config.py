"""Deadlines that cannot work are refused by name before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.handoff.config import HandoffConfig
from kvferry.transports.errors import ConfigurationError


def test_the_defaults_are_consistent() -> None:
    HandoffConfig()
    HandoffConfig(lease_s=2, heartbeat_s=1)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": -1.0}, "lease_s"),
        ({"lease_s": float("inf")}, "lease_s"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"read_timeout_s": "5"}, "read_timeout_s"),
        ({"read_timeout_s": True}, "read_timeout_s"),
        ({"max_failed_claims": 1.5}, "max_failed_claims"),
        ({"max_failed_claims": 0}, "max_failed_claims"),
        ({"lease_s": 8, "heartbeat_s": 5}, "heartbeat_s"),
        ({"backoff_s": 3}, "max_backoff_s"),
    ],
)
def test_a_setting_that_cannot_work_is_named(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigurationError, match=key) as caught:
        HandoffConfig(**settings)
    assert caught.value.key == key
