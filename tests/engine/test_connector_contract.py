"""What a connector is told, call by call: `docs/connector-contract.md`, checked on a real engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.connector.base import WorkerHalf
from kvferry.connector.output import KVConnectorOutput
from tests.engine.test_hook_errors import halves
from tests.support.engines import MakeNode, SteppedNode, drive
from tests.support.recording_connector import Call, RecordingConnector, RecordingScheduler

BLOCK = 4
#: `max_num_batched_tokens` of the nodes.
BUDGET = 16

#: Every hook that an engine calls in a step, in the order of the calls. Those of layers stand once.
HOOKS_OF_A_STEP = [
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "take_load_errors",
    "get_kv_connector_stats",
    "failure",
    "warning",
    "clear_connector_metadata",
]
#: Members of a worker half that are no hooks of a step.
OTHERS = {
    "prefer_cross_layer_blocks",
    "allocates_memory",
    "allocate_kv_memory",
    "register_kv_caches",
    "register_cross_layers_kv_cache",
    "get_handshake_metadata",
    "has_connector_metadata",
    "connector_metadata",
    "shutdown",
}


@pytest.fixture(autouse=True)
def empty_store() -> Iterator[None]:
    yield
    RecordingConnector.store.clear()


@pytest.fixture
def make_store(make_node: MakeNode) -> Any:
    def make(load: str = "", **settings: Any) -> SteppedNode:
        transfer = {
            "kv_connector_module_path": "tests.support.recording_connector",
            "kv_connector_extra_config": {"load": load},
        }
        return make_node(
            connector="RecordingConnector", role="kv_both", options=transfer, layout="per-layer", **settings
        )

    return make


def tokens(count: int, start: int = 1) -> list[int]:
    return list(range(start, start + count))


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


def told(scheduler: RecordingScheduler, name: str) -> list[tuple[str, int]]:
    """The hooks called about a request, and how many tokens it had computed at each."""
    return [(call.hook, call.num_computed_tokens) for call in scheduler.calls_of(name)]


def call_of(scheduler: RecordingScheduler, name: str, hook: str) -> Call:
    (call,) = [call for call in scheduler.calls_of(name) if call.hook == hook]
    return call


def test_a_prompt_of_several_steps_grows_block_by_block(make_store: Any) -> None:
    node = make_store()
    scheduler, _ = halves(node)
    num_prompt = 2 * BUDGET + 5
    node.answer(tokens(num_prompt), max_tokens=3)
    assert told(scheduler, "q0") == [
        ("on_new_request", 0),
        ("get_num_new_matched_tokens", 0),
        ("update_state_after_alloc", 0),
        ("request_progressed", BUDGET),
        ("request_progressed", 2 * BUDGET),
        ("request_finished", num_prompt + 2),  # all tokens but the last, whose key and value nothing needs
    ]
    steps = scheduler.steps_of("q0")
    assert [(item.num_computed_tokens, item.num_scheduled_tokens) for item in steps] == [
        (0, BUDGET),
        (BUDGET, BUDGET),
        (2 * BUDGET, 5),
        (num_prompt, 1),
        (num_prompt + 1, 1),
    ]
    # Each step has blocks for its own tokens and those before, never for the whole prompt.
    for item in steps:
        end = item.num_computed_tokens + item.num_scheduled_tokens
        assert len(item.block_ids[0]) == num_blocks(end)
    for before, after in itertools.pairwise(steps):
        assert after.block_ids[0][: len(before.block_ids[0])] == before.block_ids[0]
    calls = scheduler.calls_of("q0")
    assert calls[2].block_ids == steps[0].block_ids
    assert [calls[3].block_ids, calls[4].block_ids] == [steps[0].block_ids, steps[1].block_ids]
    assert calls[5].block_ids == steps[-1].block_ids
    assert calls[5].finish_reason == "length"


@pytest.mark.parametrize("num_prompt", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
@pytest.mark.parametrize("load", ["", "sync", "async"])
def test_the_last_token_is_always_computed(
    num_prompt: int, load: str, make_store: Any, assert_same: Any
) -> None:
    """The node's own cache and a synchronous load leave it out.

    An asynchronous load may bring it, in vain.
    """
    prompt = tokens(num_prompt, 100)
    node = make_store(load, enable_prefix_caching=not load)
    scheduler, _ = halves(node)
    for _ in range(2):
        assert_same(node.answer(prompt, max_tokens=3), "llama", prompt, 3)
    num_full, num_before_last = num_prompt // BLOCK * BLOCK, (num_prompt - 1) // BLOCK * BLOCK
    match = call_of(scheduler, "q1", "get_num_new_matched_tokens")
    first = scheduler.steps_of("q1")[0]
    allocations = [call for call in scheduler.calls_of("q1") if call.hook == "update_state_after_alloc"]
    assert match.num_computed_tokens == allocations[0].num_computed_tokens == 0
    if load == "async":
        assert (match.num_tokens, allocations[0].num_tokens) == (0, num_full)
        assert first.num_computed_tokens == min(num_full, num_prompt - 1)
        if num_full:
            # Blocks for what is loaded, and no others; then those of the step, without external tokens.
            assert [len(call.block_ids[0]) for call in allocations] == [
                num_full // BLOCK,
                num_blocks(num_prompt),
            ]
            assert (allocations[1].num_tokens, allocations[1].num_computed_tokens) == (
                0,
                first.num_computed_tokens,
            )
    else:
        num_local, num_loaded = (0, num_before_last) if load else (num_before_last, 0)
        assert (match.num_tokens, allocations[0].num_tokens) == (num_local, num_loaded)
        assert first.num_computed_tokens == num_before_last
        assert len(allocations) == 1
        assert allocations[0].block_ids == first.block_ids
    assert first.num_scheduled_tokens == num_prompt - first.num_computed_tokens


def test_a_load_comes_after_what_the_node_has_itself(make_store: Any, assert_same: Any) -> None:
    prompt = tokens(30)
    node = make_store("sync")
    node.answer(prompt, max_tokens=1)
    fresh = make_store("sync")  # with the same store, and an empty prefix cache
    fresh.answer(prompt[:9], max_tokens=1)
    assert_same(fresh.answer(prompt, max_tokens=4), "llama", prompt, 4)
    scheduler, _ = halves(fresh)
    assert call_of(scheduler, "q1", "get_num_new_matched_tokens").num_tokens == 8
    allocation = call_of(scheduler, "q1", "update_state_after_alloc")
    assert (allocation.num_computed_tokens, allocation.num_tokens) == (0, 20)
    (first, *_) = scheduler.steps_of("q1")
    assert (first.num_computed_tokens, first.num_scheduled_tokens) == (28, 2)


def test_each_layer_of_each_step_is_waited_for_and_saved(make_store: Any) -> None:
    node = make_store()
    _, worker = halves(node)
    node.answer(tokens(BUDGET + 3), max_tokens=2)
    layers = list(worker.caches)
    assert len(layers) == 3
    around_layers = [f"{hook} {name}" for name in layers for hook in ("wait_for_layer_load", "save_kv_layer")]
    before, after = HOOKS_OF_A_STEP[1:3], HOOKS_OF_A_STEP[5:]
    with_forward, without_forward = [*before, *around_layers, *after], [*before, *after]
    assert worker.calls == [*with_forward * 3, *without_forward]  # the last step reports the end
    public = {name for name in vars(WorkerHalf) if not name.startswith("_")}
    assert public == {*HOOKS_OF_A_STEP, *OTHERS}


@pytest.mark.parametrize("page_order", ["NHD", "HND"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3n"])
def test_layers_of_every_kind_are_waited_for_and_saved(family: str, page_order: str, make_store: Any) -> None:
    """Windows, and layers that share another's cache: those are saved under its owner's name."""
    node = make_store(page_order=page_order, block_size=16)
    _, worker = halves(node)
    node.answer(tokens(5), max_tokens=1)
    owners = {cache.data_ptr(): name for name, cache in reversed(worker.caches.items())}
    for hook in ("wait_for_layer_load", "save_kv_layer"):
        named = [call.removeprefix(f"{hook} ") for call in worker.calls if call.startswith(hook)]
        assert sorted(named) == sorted(owners.values())


def test_not_yet_is_asked_again_in_each_step_while_others_run(make_store: Any, assert_same: Any) -> None:
    node = make_store()
    scheduler, _ = halves(node)
    scheduler.num_not_yet = 3
    node.add("late", tokens(10), max_tokens=2)
    node.step()
    assert told(scheduler, "late") == [("on_new_request", 0), ("get_num_new_matched_tokens", 0)]
    node.add("next", tokens(10, 50), max_tokens=2)
    scheduler.num_not_yet = 1  # for the one that waits longer: it is asked first
    node.step()
    assert [item.request_id for item in scheduler.steps_of("next")]
    assert not scheduler.steps_of("late")
    node.run()
    assert [hook for hook, _ in told(scheduler, "late")].count("get_num_new_matched_tokens") == 3
    assert_same(node.tokens("late"), "llama", tokens(10), 2)


def test_a_request_that_loses_its_blocks_begins_again(make_store: Any, assert_same: Any) -> None:
    node = make_store(num_blocks=14, enable_prefix_caching=False)
    scheduler, worker = halves(node)
    for name, start in (("old", 1), ("new", 60)):
        node.add(name, tokens(14, start), max_tokens=20)
    node.run()
    assert node.last("new").metrics.num_preemptions == 1
    hooks = [hook for hook, _ in told(scheduler, "new")]
    # It is asked about again, gets other blocks, and ends once.
    assert hooks.count("get_num_new_matched_tokens") == hooks.count("update_state_after_alloc") == 2
    assert (hooks.count("on_new_request"), hooks.count("request_finished")) == (1, 1)
    again = [call for call in scheduler.calls_of("new") if call.hook == "update_state_after_alloc"][1]
    assert again.num_computed_tokens == 0
    starts = [item.num_computed_tokens for item in scheduler.steps_of("new")]
    (restart,) = [index for index, start in enumerate(starts) if index and start == 0]
    # The generated tokens are computed again like tokens of the prompt.
    assert scheduler.steps_of("new")[restart].num_scheduled_tokens > 14
    at = worker.calls.index("handle_preemptions")
    assert worker.calls[at + 1] == "bind_connector_metadata"
    assert worker.calls.count("handle_preemptions") == 1
    for name, start in (("old", 1), ("new", 60)):
        assert_same(node.tokens(name), "llama", tokens(14, start), 20)


def test_a_request_that_loaded_is_not_asked_about_again(make_store: Any, assert_same: Any) -> None:
    prompt = tokens(14, 60)
    make_store("sync").answer(prompt, max_tokens=1)
    node = make_store("sync", num_blocks=14, enable_prefix_caching=False)
    scheduler, _ = halves(node)
    node.add("old", tokens(14), max_tokens=20)
    node.add("new", prompt, max_tokens=20)
    node.run()
    assert node.last("new").metrics.num_preemptions == 1
    calls = scheduler.calls_of("new")
    assert [call.hook for call in calls].count("get_num_new_matched_tokens") == 1
    assert [call.num_tokens for call in calls if call.hook == "update_state_after_alloc"] == [12, 0]
    assert_same(node.tokens("new"), "llama", prompt, 20)


@pytest.mark.parametrize("stage", ["waiting", "loading", "running", "between chunks"])
def test_an_abort_ends_the_request_once_at_any_stage(stage: str, make_store: Any, assert_same: Any) -> None:
    prompt = tokens(2 * BUDGET + 1)
    make_store("async").answer(prompt, max_tokens=1)
    node = make_store("async" if stage == "loading" else "")
    scheduler, worker = halves(node)
    worker.holds_reports = True
    node.add("q", prompt, max_tokens=9)
    num_steps = {"waiting": 0, "loading": 1, "between chunks": 1, "running": 4}[stage]
    for _ in range(num_steps):
        node.step()
    node.abort("q")
    end = call_of(scheduler, "q", "request_finished")
    num_computed = {"waiting": 0, "loading": 0, "between chunks": BUDGET, "running": len(prompt) + 1}[stage]
    num_held = {"loading": len(prompt) - 1}.get(stage, num_computed)
    assert (end.num_computed_tokens, len(end.block_ids[0])) == (num_computed, num_blocks(num_held))
    assert end.finish_reason == "abort"
    # The load may still write into its blocks, so they are kept until its end is reported.
    assert node.is_whole is (stage != "loading")
    worker.holds_reports = False
    node.run()
    assert node.is_whole
    assert_same(node.answer(prompt, max_tokens=2), "llama", prompt, 2)


def test_a_failed_load_continues_after_the_valid_prefix_with_the_same_blocks_before_it(
    make_store: Any, assert_same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(13)
    make_store("async").answer(prompt, max_tokens=1)
    node = make_store("async")
    scheduler, worker = halves(node)
    monkeypatch.setattr(
        worker,
        "get_block_ids_with_load_errors",
        lambda: {call_of(scheduler, "q", "update_state_after_alloc").block_ids[0][1]},
    )
    node.add("q", prompt, max_tokens=3)
    node.step()
    monkeypatch.undo()
    drive(node, until=lambda: node.is_over("q"))
    ordered, again = [call for call in scheduler.calls_of("q") if call.hook == "update_state_after_alloc"]
    assert (ordered.num_tokens, again.num_tokens) == (12, 0)
    assert again.num_computed_tokens == BLOCK
    assert again.block_ids[0][0] == ordered.block_ids[0][0]
    assert scheduler.steps_of("q")[0].num_computed_tokens == BLOCK
    assert_same(node.tokens("q"), "llama", prompt, 3)


def test_reports_reach_the_scheduler_half_before_the_engine_acts_on_them(
    make_store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens(9)
    make_store("async").answer(prompt, max_tokens=1)
    node = make_store("async")
    scheduler, _ = halves(node)
    seen: list[tuple[set[str], int]] = []

    def note(output: KVConnectorOutput) -> None:
        seen.append((output.finished_recving, node.core.stats().num_loading))

    monkeypatch.setattr(scheduler, "update_connector_output", note)
    node.answer(prompt, max_tokens=1)
    assert [(len(received), num_loading) for received, num_loading in seen if received] == [(1, 1)]
