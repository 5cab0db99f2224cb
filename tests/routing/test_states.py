"""The state machine of a node, without sockets or clocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.states import LONGEST_EJECTION_S, EjectionRule, Health, NodeState, NodeStatus

READY = Health(NodeState.READY)
LATE = Health(None, "/ready did not answer within 5 s", ends_requests=True)
GONE = Health(NodeState.GONE, "the process is gone: connection refused")
DRAINING = Health(NodeState.DRAINING, "/ready says draining", is_reported=True)
OVERLOADED = Health(NodeState.OVERLOADED, "/ready says overloaded", is_reported=True)


def ready(num_failures: int = 3) -> NodeStatus:
    status = NodeStatus(EjectionRule(num_failures, first_s=10.0))
    status.checked(READY, 0)
    return status


def fail(status: NodeStatus, times: int, now: float = 0.0, *, has_substitute: bool = True) -> None:
    for _ in range(times):
        status.request_failed("the connection broke", now, has_substitute=has_substitute)


@pytest.mark.parametrize("health", [READY, GONE, DRAINING, OVERLOADED], ids=lambda health: health.state.value)
def test_a_check_decides_the_state_of_a_node_that_is_not_ejected(health: Health) -> None:
    for before in (READY, GONE, DRAINING, OVERLOADED):
        status = NodeStatus()
        status.checked(before, 0)
        status.checked(health, 1)
        assert status.state is health.state
        assert status.why == status.check_error
        assert status.check_error.startswith(health.error)


def test_one_check_without_an_answer_changes_nothing_and_a_second_one_makes_the_node_gone() -> None:
    status = ready()
    status.checked(LATE, 1)
    assert status.state is NodeState.READY
    status.checked(LATE, 2)
    assert status.state is NodeState.GONE


def test_failed_requests_in_a_row_eject_a_node_until_its_time_is_over_and_a_check_succeeds() -> None:
    status = ready()
    fail(status, 2)
    status.request_answered()
    fail(status, 2)
    assert status.state is NodeState.READY
    fail(status, 1, now=100)
    assert status.state is NodeState.EJECTED
    assert "3 requests in a row failed" in status.why
    assert "the connection broke" in status.why
    for health in (READY, OVERLOADED):
        status.checked(health, 109.9)
        assert status.state is NodeState.EJECTED
    status.checked(READY, 110)
    assert status.state is NodeState.READY
    assert status.is_on_trial


def test_a_node_on_trial_is_ejected_for_twice_as_long_by_one_failure_and_acquitted_by_one_success() -> None:
    status = ready()
    fail(status, 3, now=0)
    status.checked(READY, 10)
    fail(status, 1, now=10)
    assert (status.state, status.ejected_until, status.num_ejections) == (NodeState.EJECTED, 30, 2)
    status.checked(READY, 30)
    status.request_answered()
    assert not status.is_on_trial
    fail(status, 2, now=30)
    assert status.state is NodeState.READY
    fail(status, 1, now=30)
    assert (status.state, status.ejected_until) == (NodeState.EJECTED, 40)


@pytest.mark.parametrize("found", [GONE, DRAINING])
def test_a_new_process_at_the_address_of_an_ejected_node_is_used_at_once(found: Health) -> None:
    status = ready()
    fail(status, 3)
    status.checked(found, 1)
    assert status.state is found.state
    status.checked(GONE, 2)
    status.checked(READY, 3)
    assert status.state is NodeState.READY
    assert not status.is_on_trial
    fail(status, 2)
    assert status.state is NodeState.READY


def test_the_last_ready_node_is_not_ejected() -> None:
    status = ready()
    fail(status, 10, has_substitute=False)
    assert status.state is NodeState.READY
    fail(status, 1)
    assert status.state is NodeState.EJECTED


def test_0_failures_eject_no_node() -> None:
    status = ready(num_failures=0)
    fail(status, 100)
    assert status.state is NodeState.READY


def test_a_dropped_node_stays_leaving_until_it_is_named_again() -> None:
    status = ready()
    status.drop()
    for health in (READY, GONE, LATE, LATE, DRAINING):
        status.checked(health, 1)
    fail(status, 5)
    assert status.state is NodeState.LEAVING
    assert status.check_error == DRAINING.error
    status.name_again()
    assert status.state is NodeState.UNKNOWN
    status.checked(READY, 2)
    assert status.state is NodeState.READY


def test_a_failure_of_the_router_itself_changes_no_state() -> None:
    status = ready()
    for _ in range(5):
        status.checked(Health(None, "Too many open files", is_local=True), 1)
    assert (status.state, status.num_failed_checks) == (NodeState.READY, 0)


@given(st.integers(1, 10_000), st.floats(0.01, LONGEST_EJECTION_S))
def test_ejections_double_up_to_a_limit(number: int, first_s: float) -> None:
    rule = EjectionRule(5, first_s)
    assert rule.lasts_s(1) == first_s
    assert rule.lasts_s(number) <= rule.lasts_s(number + 1) <= LONGEST_EJECTION_S
    if rule.lasts_s(number + 1) < LONGEST_EJECTION_S and number <= 16:
        assert rule.lasts_s(number + 1) == 2 * rule.lasts_s(number)


@pytest.mark.parametrize(("after", "first_s"), [(-1, 10.0), (5, 0.0), (5, 301.0), (5, float("nan"))])
def test_limits_that_make_no_sense_are_refused(after: int, first_s: float) -> None:
    with pytest.raises(ValueError, match="--eject-"):
        EjectionRule(after, first_s)
