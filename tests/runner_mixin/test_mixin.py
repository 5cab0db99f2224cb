"""The calls of one step come in the right order, whichever of them raises."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from kvferry.connector.errors import WorkerHookError
from kvferry.connector.output import KVConnectorOutput
from kvferry.runner_mixin import (
    EMPTY_FORWARD_CONTEXT,
    EMPTY_MODEL_RUNNER_OUTPUT,
    ForwardContext,
    KVConnectorModelRunnerMixin,
    ModelRunnerOutput,
    maybe_transfer_kv_layer,
    set_forward_context,
)
from kvferry.transports.errors import KVTransferStateError

REPORTS = [
    "get_finished ",
    "get_block_ids_with_load_errors",
    "take_load_errors",
    "get_kv_connector_stats",
]
REPORTED = ["get_finished", "get_block_ids_with_load_errors", "take_load_errors"]


class Layer:
    """A layer with a cache."""

    kv_cache: ClassVar = [torch.zeros(1)]


class Runner(KVConnectorModelRunnerMixin):
    """A runner as an engine writes it."""


@pytest.fixture
def runner():
    return Runner()


@pytest.fixture
def in_step():
    with set_forward_context(EMPTY_FORWARD_CONTEXT) as context:
        yield context


def test_the_lifecycle_has_its_order(runner, connector, make_step, in_step):
    with runner.maybe_get_kv_connector_output(make_step(finished_req_ids={"b", "a"})):
        connector.calls.append("body")
    assert connector.calls == [
        "bind",
        "start_load_kv",
        "body",
        "wait_for_save",
        "get_finished a,b",
        *REPORTS[1:],
        "clear",
    ]
    assert not connector.has_connector_metadata()


def test_preemptions_are_handled_before_everything_else(runner, connector, make_step, in_step):
    with runner.maybe_get_kv_connector_output(make_step(preempted_req_ids={"a"})):
        pass
    assert connector.calls[:2] == ["handle_preemptions", "bind"]


def test_the_yielded_output_holds_the_reports(runner, connector, make_step, in_step):
    connector.reports = {
        "finished": ({"sent"}, {"loaded"}),
        "blocks": {3},
        "errors": {"loaded": "peer lost"},
        "stats": {"bytes": 1},
    }
    with runner.maybe_get_kv_connector_output(make_step()) as output:
        assert output.is_empty()
    assert output == KVConnectorOutput({"sent"}, {"loaded"}, {3}, {"loaded": "peer lost"}, {"bytes": 1})


def test_waiting_for_saves_can_be_switched_off(runner, connector, make_step, in_step):
    with runner._get_kv_connector_output(make_step(), wait_for_save=False):
        pass
    assert connector.calls == ["bind", "start_load_kv", *REPORTS, "clear"]


def test_the_tail_runs_when_the_body_raises(runner, connector, make_step, in_step):
    connector.reports = {"finished": ({"sent"}, None)}
    with pytest.raises(ZeroDivisionError):
        with runner.maybe_get_kv_connector_output(make_step()) as output:
            raise ZeroDivisionError
    assert connector.calls == ["bind", "start_load_kv", "wait_for_save", *REPORTS, "clear"]
    assert output.finished_sending == {"sent"}


HOOKS = [
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "take_load_errors",
    "get_kv_connector_stats",
    "clear_connector_metadata",
]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_raises_stops_neither_the_step_nor_the_other_hooks(
    runner, connector, make_step, hook, caplog
):
    def run() -> list[str]:
        connector.calls.clear()
        with set_forward_context(ForwardContext({"layer": Layer()})):
            with runner.maybe_get_kv_connector_output(make_step(preempted_req_ids={"a"})):
                with maybe_transfer_kv_layer("layer"):
                    connector.calls.append("body")
        return list(connector.calls)

    expected = run()
    connector.raises.add({"clear_connector_metadata": "clear"}.get(hook, hook))
    with pytest.raises(WorkerHookError, match=f"{hook} of the connector .* failed: OSError") as caught:
        run()
    is_saved = HOOKS.index(hook) >= HOOKS.index("save_kv_layer")
    assert connector.calls == [call for call in expected if is_saved or not call.startswith("save")]
    assert caught.value.output.hook_errors.keys() == {hook}
    assert "in _record\n    raise OSError(f" in caplog.text  # the traceback
    assert not connector.has_connector_metadata()


def test_a_hook_that_returns_something_else_counts_as_one_that_raises(runner, connector, make_step, in_step):
    connector.reports = {"finished": None, "blocks": None, "errors": None}
    with pytest.raises(WorkerHookError) as caught:
        with runner.maybe_get_kv_connector_output(make_step()):
            pass
    assert list(caught.value.output.hook_errors) == REPORTED


def test_metadata_that_cannot_be_bound_starts_no_loads(runner, connector, make_step, in_step):
    connector.raises.add("bind")
    with pytest.raises(WorkerHookError, match="bind_connector_metadata"):
        with runner.maybe_get_kv_connector_output(make_step()):
            connector.calls.append("body")
    assert connector.calls == ["bind", "body", "wait_for_save", *REPORTS, "clear"]


def test_the_error_of_the_body_comes_before_those_of_hooks(runner, connector, make_step, in_step):
    connector.raises.add("wait_for_save")
    with pytest.raises(ZeroDivisionError):
        with runner.maybe_get_kv_connector_output(make_step()) as output:
            raise ZeroDivisionError("in the model")
    assert connector.calls[-1] == "clear"
    assert output.hook_errors.keys() == {"wait_for_save"}


def test_the_loads_of_layers_that_a_failed_body_did_not_reach_are_waited_for(runner, connector, make_step):
    def compute() -> None:
        with maybe_transfer_kv_layer("a"):
            pass
        with maybe_transfer_kv_layer("b"):
            raise ZeroDivisionError

    with set_forward_context(ForwardContext({name: Layer() for name in "abc"})):
        with pytest.raises(ZeroDivisionError), runner.maybe_get_kv_connector_output(make_step()):
            compute()
    waits = [call for call in connector.calls if call.startswith("wait_for_layer_load")]
    assert waits == [f"wait_for_layer_load {name}" for name in "abc"]
    assert connector.calls.index(waits[-1]) < connector.calls.index("wait_for_save")


def test_a_step_without_metadata_is_an_error(runner, connector, make_step, in_step):
    with pytest.raises(KVTransferStateError, match="build_connector_meta"):
        runner.maybe_setup_kv_connector(make_step(kv_connector_metadata=None))
    with pytest.raises(KVTransferStateError, match="build_connector_meta"):
        with runner.maybe_get_kv_connector_output(make_step(kv_connector_metadata=None)):
            pytest.fail("the body ran")
    assert "bind" not in connector.calls


def test_a_step_outside_a_forward_context_is_an_error(runner, connector, make_step):
    with pytest.raises(KVTransferStateError, match="set_forward_context"):
        runner.maybe_setup_kv_connector(make_step())
    assert connector.calls == []


def test_the_single_calls_reach_the_connector(runner, connector, make_step, in_step):
    connector.reports = {"finished": ({"a"}, {"b"}), "stats": 7}
    runner.maybe_setup_kv_connector(make_step())
    assert connector.has_connector_metadata()
    runner.maybe_wait_for_kv_save()
    assert runner.get_finished_kv_transfers(make_step(finished_req_ids={"c"})) == ({"a"}, {"b"})
    assert runner.get_kv_connector_stats() == 7
    assert connector.calls == [
        "bind",
        "start_load_kv",
        "wait_for_save",
        "get_finished c",
        "get_kv_connector_stats",
    ]


def test_without_a_connector_nothing_happens(runner, config, make_step):
    step = make_step(kv_connector_metadata=None)
    runner.maybe_setup_kv_connector(step)
    runner.maybe_wait_for_kv_save()
    runner.ensure_kv_transfer_shutdown()
    assert runner.get_finished_kv_transfers(step) == (None, None)
    assert runner.get_kv_connector_stats() is None
    with runner.maybe_get_kv_connector_output(step) as output:
        assert output is None
    alone = replace(config, kv_transfer=None)
    assert runner.kv_connector_no_forward(step, alone) is EMPTY_MODEL_RUNNER_OUTPUT
    with pytest.raises(KVTransferStateError, match="no KV connector"):
        runner.kv_connector_no_forward(step, config)


def test_a_step_without_forward_still_sends_and_receives(runner, connector, config, make_step):
    assert runner.kv_connector_no_forward(make_step(), config) is EMPTY_MODEL_RUNNER_OUTPUT
    assert connector.calls == ["bind", "start_load_kv", "wait_for_save", *REPORTS, "clear"]


def test_a_report_without_forward_is_a_copy_of_the_empty_output(runner, connector, config, make_step):
    connector.reports = {"finished": (None, {"loaded"})}
    output = runner.kv_connector_no_forward(make_step(), config)
    assert output is not EMPTY_MODEL_RUNNER_OUTPUT
    assert output.kv_connector_output == KVConnectorOutput(finished_recving={"loaded"})
    assert ModelRunnerOutput() == EMPTY_MODEL_RUNNER_OUTPUT
