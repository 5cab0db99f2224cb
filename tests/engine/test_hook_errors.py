"""An exception in an author's connector fails the requests that it concerns, with its cause, and nothing
else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvferry.lab.engine.handoffs
from kvferry.connector.base import KVConnectorBase
from kvferry.connector.errors import ConnectorError
from tests.support.engines import MakeNode, SteppedNode, drive
from tests.support.recording_connector import MARK, RecordingConnector, RecordingScheduler, RecordingWorker

BLOCK = 4
VICTIM = [MARK, *range(40, 58)]
OTHER = [*range(1, 21)]

ABOUT_ONE_REQUEST = [
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "request_progressed",
    "request_finished",
]
#: The step's tokens do not count.
VOIDING = [
    "build_connector_meta",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_block_ids_with_load_errors",
    "take_load_errors",
    "clear_connector_metadata",
]
HARMLESS = ["get_kv_connector_stats", "failure", "warning", "update_connector_output", "take_events"]


@pytest.fixture(autouse=True)
def empty_store() -> Iterator[None]:
    yield
    RecordingConnector.store.clear()


@pytest.fixture
def make_store(make_node: MakeNode) -> Any:
    """Make a node with the store; its options as keywords, engine settings in `settings`."""

    def make(settings: Any = (), policy: Any = "fail", **options: Any) -> SteppedNode:
        transfer = {
            "kv_connector_module_path": "tests.support.recording_connector",
            "kv_connector_extra_config": options,
            "kv_load_failure_policy": policy,
        }
        return make_node(
            connector="RecordingConnector",
            role="kv_both",
            options=transfer,
            layout="per-layer",
            **dict(settings),
        )

    return make


def halves(node: SteppedNode) -> tuple[RecordingScheduler, RecordingWorker]:
    scheduler = node.core.parts.scheduler.handoffs._connector
    worker = node.slot.connector
    assert isinstance(scheduler, KVConnectorBase)
    assert isinstance(worker, KVConnectorBase)
    assert isinstance(scheduler._half, RecordingScheduler)
    assert isinstance(worker._half, RecordingWorker)
    return scheduler._half, worker._half


def heal(node: SteppedNode) -> None:
    for half in halves(node):
        half.raise_in = ""


def error_of(node: SteppedNode, name: str) -> str:
    last = node.last(name)
    assert last.finish_reason == "error", last
    return last.error


def assert_serves(node: SteppedNode, assert_same: Any, *prompts: list[int]) -> None:
    """Every prompt gets the right answer, all blocks are back, and nothing is wrong with the node."""
    heal(node)
    node.run()
    for prompt in prompts:
        assert_same(node.answer(prompt, max_tokens=5), "llama", prompt, 5)
    assert node.is_whole
    stats = node.core.stats()
    assert (stats.transfer_error, stats.transfer_warning) == ("", "")


@pytest.mark.parametrize("hook", ABOUT_ONE_REQUEST)
def test_a_hook_about_one_request_fails_that_request(
    hook: str, make_store: Any, assert_same: Any, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_store(raise_in=hook, load="sync")
    node.add("other", OTHER, max_tokens=8)
    if hook == "on_new_request":
        with pytest.raises(Exception, match="on_new_request of the connector RecordingConnector failed"):
            node.add("victim", VICTIM, max_tokens=8)
    else:
        node.add("victim", VICTIM, max_tokens=8)
        node.run()
        why = f"{hook} of the connector RecordingConnector failed: Boom: on purpose"
        assert error_of(node, "victim") == why
        assert sum(record.exc_info is not None for record in caplog.records) == 1
    node.run()
    assert_same(node.tokens("other"), "llama", OTHER, 8)
    assert_serves(node, assert_same, VICTIM, OTHER)


@pytest.mark.parametrize("hook", VOIDING)
def test_a_hook_for_a_whole_step_fails_the_requests_of_that_step(
    hook: str, make_store: Any, assert_same: Any, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_store({"max_num_seqs": 2}, raise_in=hook, load="sync")
    node.add("other", OTHER[:6], max_tokens=8)
    node.step()
    node.add("victim", VICTIM, max_tokens=8)
    node.add("waiting", OTHER, max_tokens=8)  # for one of the two places
    node.step()
    why = f"{hook} of the connector RecordingConnector failed: Boom: on purpose"
    assert [error_of(node, name) for name in ("other", "victim")] == [why, why]
    assert node.core.stats().transfer_warning == why
    assert caplog.text.count("Boom: on purpose\n") <= 2  # one traceback, and one of a second attempt
    node.run()
    assert_same(node.tokens("waiting"), "llama", OTHER, 8)
    assert_serves(node, assert_same, VICTIM, OTHER, OTHER[:6])


@pytest.mark.parametrize("hook", HARMLESS)
def test_a_hook_that_nothing_depends_on_fails_nothing(hook: str, make_store: Any, assert_same: Any) -> None:
    node = make_store(raise_in=hook, load="async")
    for name in ("first", "again"):
        node.add(name, VICTIM, max_tokens=8)
        node.run()
        assert_same(node.tokens(name), "llama", VICTIM, 8)
    if hook not in ("update_connector_output", "take_events"):  # these are called only if there is a report
        assert hook in node.core.stats().transfer_warning
    assert_serves(node, assert_same, VICTIM)


def test_nothing_is_computed_from_what_was_not_loaded(make_store: Any, assert_same: Any) -> None:
    node = make_store({"enable_prefix_caching": False}, load="sync")
    assert_same(node.answer(VICTIM, max_tokens=3), "llama", VICTIM, 3)
    for pages in RecordingConnector.store.values():
        for name, page in pages.items():
            pages[name] = torch.full_like(page, float("nan"))
    halves(node)[1].raise_in = "get_block_ids_with_load_errors"
    node.add("victim", VICTIM, max_tokens=3)
    node.run()
    assert "get_block_ids_with_load_errors" in error_of(node, "victim")
    assert node.tokens("victim") == []
    RecordingConnector.store.clear()
    assert_serves(node, assert_same, VICTIM)


def test_the_blocks_of_a_failed_step_are_used_again_after_a_step_in_which_nothing_raises(
    make_store: Any, assert_same: Any
) -> None:
    node = make_store({"num_blocks": 16, "max_num_seqs": 1}, raise_in="wait_for_save")
    scheduler, worker = halves(node)
    node.add("victim", VICTIM, max_tokens=2)
    node.step()
    assert "wait_for_save" in error_of(node, "victim")
    (held,) = scheduler.steps_of("victim")
    assert not node.is_whole
    # While the connector raises, later requests fail as well, and none gets the blocks of another one.
    node.add("second", [MARK, 7, 8, 9, 10], max_tokens=2)
    node.step()
    (other,) = scheduler.steps_of("second")
    assert "wait_for_save" in error_of(node, "second")
    assert not set(held.block_ids[0]) & set(other.block_ids[0])
    worker.raise_in = ""
    worker.calls.clear()
    node.step()
    assert worker.calls[0] == "handle_preemptions"  # the half learns first that it loses the blocks
    assert node.is_whole
    assert_serves(node, assert_same, VICTIM)


@pytest.mark.parametrize("hook", ["start_load_kv", "bind_connector_metadata", "build_connector_meta"])
def test_a_load_that_may_have_begun_keeps_its_blocks_until_its_end_is_reported(
    hook: str, make_store: Any, assert_same: Any
) -> None:
    node = make_store({"enable_prefix_caching": False}, load="async")
    assert_same(node.answer(VICTIM, max_tokens=3), "llama", VICTIM, 3)
    scheduler, worker = halves(node)
    scheduler.raise_in = worker.raise_in = hook
    worker.holds_reports = True
    node.add("victim", VICTIM, max_tokens=3)
    node.step()
    assert hook in error_of(node, "victim")
    heal(node)
    for _ in range(5):
        node.step()
    stats = node.core.stats()
    assert stats.num_blocks - stats.num_free_blocks == len(VICTIM) // BLOCK
    assert "blocks stay reserved until the connector reports the end" in stats.transfer_warning
    assert hook in stats.transfer_warning
    node.add("other", OTHER, max_tokens=3)
    drive(node, until=lambda: node.is_over("other"))
    assert_same(node.tokens("other"), "llama", OTHER, 3)
    worker.holds_reports = False
    worker.done |= {call.request_id for call in scheduler.calls_of("victim")}
    assert_serves(node, assert_same, VICTIM)


def test_a_load_whose_end_may_be_lost_fails_while_the_others_of_its_step_go_on(
    make_store: Any, assert_same: Any
) -> None:
    node = make_store({"enable_prefix_caching": False}, load="async")
    assert_same(node.answer(VICTIM, max_tokens=3), "llama", VICTIM, 3)
    worker = halves(node)[1]
    worker.raise_in = "get_finished"
    node.add("other", OTHER[:6], max_tokens=8)
    node.add("victim", VICTIM, max_tokens=3)
    node.step()
    assert "get_finished of the connector" in error_of(node, "victim")
    assert not node.is_over("other")
    assert not node.is_whole
    node.run()
    assert_same(node.tokens("other"), "llama", OTHER[:6], 8)
    assert_serves(node, assert_same, VICTIM)


@pytest.mark.parametrize("is_refusal", [True, False])
def test_blocks_are_kept_if_a_load_may_have_been_ordered_before_the_exception(
    is_refusal: bool, make_store: Any, assert_same: Any
) -> None:
    node = make_store({"enable_prefix_caching": False}, load="async")
    assert_same(node.answer(VICTIM, max_tokens=3), "llama", VICTIM, 3)
    scheduler, worker = halves(node)
    scheduler.raise_in = "update_state_after_alloc"
    worker.holds_reports = True
    if is_refusal:
        scheduler.refusal = ConnectorError("the store is full")
    node.add("victim", VICTIM, max_tokens=3)
    node.step()
    assert "update_state_after_alloc" in error_of(node, "victim")
    # A `ConnectorError` says that nothing was ordered.
    assert node.is_whole is is_refusal
    worker.holds_reports = False
    assert_serves(node, assert_same, VICTIM)


def test_a_preemption_that_the_connector_cannot_handle_fails_the_step(
    make_store: Any, assert_same: Any
) -> None:
    node = make_store({"num_blocks": 14, "max_num_seqs": 2}, raise_in="handle_preemptions")
    for name in ("old", "new"):
        node.add(name, OTHER, max_tokens=20)
    node.run()
    assert "handle_preemptions" in error_of(node, "old")
    assert_serves(node, assert_same, OTHER)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hook_that_raises_on_one_rank_ends_no_rank(make_store: Any, assert_same: Any) -> None:
    """The other rank must not wait in vain for the one that raises in the forward pass."""
    hook = "wait_for_layer_load"
    settings = {"tensor_parallel_size": 2, "num_threads": 1}
    node = make_store(settings, raise_in=hook, raise_rank=1)
    node.add("victim", VICTIM, max_tokens=8)
    drive(node, until=lambda: node.is_over("victim"))
    assert error_of(node, "victim") == f"{hook} of the connector RecordingConnector failed: Boom: on purpose"
    node.run()
    assert_same(node.answer(OTHER, max_tokens=5), "llama", OTHER, 5)
    assert node.is_whole


def test_a_connector_that_raises_in_every_step_is_reported_as_broken(
    make_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvferry.lab.engine.handoffs, "MIN_HOOK_FAILURE_S", 0.0)
    node = make_store(raise_in="start_load_kv")
    for index in range(kvferry.lab.engine.handoffs.MAX_HOOK_FAILURES_IN_A_ROW):
        assert node.core.stats().transfer_error == ""
        node.add(f"q{index}", VICTIM, max_tokens=3)
        node.step()
        assert "start_load_kv" in error_of(node, f"q{index}")
    assert "raised in 8 steps in a row; restart the node; the latest: start_load_kv" in (
        node.core.stats().transfer_error
    )
