"""The state machine of a node, without sockets or clocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.nodes.states import LONGEST_EJECTION_S, EjectionRule, Health, NodeState, NodeStatus

READY = Health(NodeState.READY)
LATE = Health(None, "/ready did not answer within 5 s", ends_requests=True)
GONE = Health(NodeState.GONE, "the process is gone: connection refused")
DRAINING = Health(NodeState.DRAINING, "/ready says draining", is_reported=True)
OVERLOADED = Health(NodeState.OVERLOADED, "/ready says overloaded", is_reported=True)


def ready(num_failures: int = 3) -> NodeStatus:
    status = NodeStatus(EjectionRule(num_failures, first_s=10.0))
    status.checked(READY)
    return status


def fail(status: NodeStatus, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        status.request_failed("the connection broke", now)


@pytest.mark.parametrize("health", [READY, GONE, DRAINING, OVERLOADED], ids=lambda health: health.state.value)
def test_a_check_decides_the_state_of_a_node(health: Health) -> None:
    for before in (READY, GONE, DRAINING, OVERLOADED):
        status = NodeStatus()
        status.checked(before)
        status.checked(health)
        assert status.state is health.state
        assert status.why == status.check_error
        assert status.check_error.startswith(health.error)


def test_one_check_without_an_answer_changes_nothing_and_a_second_one_makes_the_node_gone() -> None:
    status = ready()
    status.checked(LATE)
    assert status.state is NodeState.READY
    status.checked(LATE)
    assert status.state is NodeState.GONE


def test_failed_requests_in_a_row_let_a_ready_node_be_avoided_until_its_time_is_over() -> None:
    status = ready()
    fail(status, 2)
    status.request_answered()
    fail(status, 2)
    assert status.trouble(100, 0) == 0
    fail(status, 1, now=100)
    assert "3 requests in a row failed" in status.why
    assert "the connection broke" in status.why
    unknown, overloaded = NodeStatus(), NodeStatus()
    overloaded.checked(OVERLOADED)
    for health in (READY, OVERLOADED):
        status.checked(health)
        assert status.state is health.state
        assert status.trouble(109.9, 0) > overloaded.trouble(109.9, 0) > unknown.trouble(109.9, 0) > 0
    status.checked(READY)
    assert status.trouble(110, 0) == 0


def test_a_node_that_was_avoided_gets_one_request_at_a_time_until_one_succeeds() -> None:
    status = ready()
    fail(status, 3, now=0)
    assert status.trouble(10, 1) > status.trouble(10, 0) == 0
    status.request_answered()
    assert status.trouble(10, 1) == 0


def test_a_node_that_fails_again_is_avoided_for_twice_as_long_and_forgiven_by_one_success() -> None:
    status = ready()
    fail(status, 3, now=0)
    fail(status, 1, now=10)
    assert (status.avoided_until, status.num_ejections) == (30, 2)
    status.request_answered()
    fail(status, 2, now=30)
    assert status.trouble(30, 0) == 0
    fail(status, 1, now=30)
    assert status.avoided_until == 40


def test_requests_that_fail_while_a_node_is_avoided_count_once() -> None:
    status = ready()
    fail(status, 10, now=0)
    assert (status.avoided_until, status.num_ejections) == (10, 1)


@pytest.mark.parametrize("found", [GONE, DRAINING])
def test_a_new_process_at_the_address_of_an_avoided_node_is_used_at_once(found: Health) -> None:
    status = ready()
    fail(status, 3)
    status.checked(found)
    assert status.state is found.state
    status.checked(GONE)
    status.checked(READY)
    assert status.trouble(3, 5) == 0
    fail(status, 2)
    assert status.trouble(3, 5) == 0


def test_failures_change_no_state_so_that_the_last_node_stays_ready() -> None:
    status = ready()
    fail(status, 10)
    assert status.state is NodeState.READY


def test_0_failures_let_no_node_be_avoided() -> None:
    status = ready(num_failures=0)
    fail(status, 100)
    assert status.trouble(0, 5) == 0


def test_a_dropped_node_stays_leaving_until_it_is_named_again() -> None:
    status = ready()
    status.drop()
    for health in (READY, GONE, LATE, LATE, DRAINING):
        status.checked(health)
    fail(status, 5)
    assert status.state is NodeState.LEAVING
    assert status.check_error == DRAINING.error
    status.name_again()
    assert status.state is NodeState.UNKNOWN
    status.checked(READY)
    assert status.state is NodeState.READY


def test_a_failure_of_the_router_itself_changes_no_state() -> None:
    status = ready()
    for _ in range(5):
        status.checked(Health(None, "Too many open files", is_local=True))
    assert (status.state, status.num_failed_checks) == (NodeState.READY, 0)


@given(st.integers(1, 10_000), st.floats(0.01, LONGEST_EJECTION_S))
def test_ejections_double_up_to_a_limit(number: int, first_s: float) -> None:
    rule = EjectionRule(5, first_s)
    assert rule.lasts_s(1) == first_s
    assert rule.lasts_s(number) <= rule.lasts_s(number + 1) <= LONGEST_EJECTION_S
    if rule.lasts_s(number + 1) < LONGEST_EJECTION_S and number <= 16:
        assert rule.lasts_s(number + 1) == 2 * rule.lasts_s(number)


def test_a_limit_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="--eject-after -1"):
        EjectionRule(-1)
