"""Deadlines that cannot work are refused by name before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.connector.handoff.config import HandoffConfig
from kvferry.transports.errors import ConfigurationError


def test_the_defaults_are_consistent() -> None:
    HandoffConfig()


@pytest.mark.parametrize(("lease_s", "heartbeat_s"), [(3.0, 0.5), (30.0, 5.0), (600.0, 5.0)])
def test_a_consumer_renews_a_lease_several_times_before_it_ends(lease_s: float, heartbeat_s: float) -> None:
    assert HandoffConfig(lease_s=lease_s).heartbeat_s == heartbeat_s


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
        ({"backoff_s": 3}, "max_backoff_s"),
    ],
)
def test_a_setting_that_cannot_work_is_named(settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigurationError, match=key) as caught:
        HandoffConfig(**settings)
    assert caught.value.key == key
