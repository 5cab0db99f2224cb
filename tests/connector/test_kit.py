"""The conformance suite reports the broken promise of each planted bug.

`tests/examples` has the stores without a bug.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.connector.p2p import worker
from kvferry.connector.testing import BrokenPromiseError, ConnectorConformance, HandoffConformance
from kvferry.connector.testing.harness import node_maker
from kvferry.connector.testing.loads import SEPARATE
from kvferry.transports.testing.leaks import Leaks
from tests.support import connector_bugs as bugs
from tests.support.handoff_simulator import planted as simulated


def cut_short(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-8])


def flip_bits(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[:-8] + bytes(8))


# -- planted bugs: each must be reported ------------------------------------------------------------

#: Promises as the suite states them, abbreviated.
ONCE = "each completion is reported once"
UNDER_WAY = "only what is under way is reported as finished"
BYTES = "a load that is reported as done, and not as failed, has brought each token's keys and values"
WHOLE_BLOCKS = "a prompt that one node computed is loaded by another: each whole block"
LAST_TOKEN = "a synchronous load leaves at least the prompt's last token to compute"
NOT_MORE = "no more tokens are loaded than the prompt has"
ORDERED = "only blocks that a load was ordered for are written"
AFTER_THE_END = "nothing is written into the blocks of a load after its end was reported"
ENDS = "every transfer ends and is reported"
RELEASED = "blocks that are kept for saving are released in the end"
ANSWER = "every request gets its answer"
FAILED_BLOCKS = "get_block_ids_with_load_errors names blocks of loads that are not over"
LAYER = "wait_for_layer_load returns when the layer's part of the step's synchronous loads is in place"

POISON = "has the contents of a free block"


@dataclass(frozen=True)
class Bug:
    """A planted bug, and what must be reported.

    Attributes:
        name: Of its class in `bugs`.
        promise: The beginning of the promise that is named.
        test: The test of the suite that must fail.
        seen: A pattern of what it says was seen.
        arguments: Of the test, besides its fixtures.
        ends: Whether the bug is seen at once; otherwise, after the suite's deadline.
    """

    name: str
    promise: str
    test: str
    seen: str
    arguments: tuple[Any, ...] = ()
    ends: bool = True
    damage: Callable[[Path], None] = flip_bits


ANY = "test_what_one_node_computed_another_loads"
HERE = "test_what_is_here_already_is_not_loaded"
SIMILAR = "test_a_similar_prompt_gets_none_of_its_bytes_wrong"
SEPARATES = "test_what_bytes_depend_on_separates_caches"
BESIDE = "test_one_step_may_load_compute_and_save"
SEVERAL = "test_requests_of_one_step_are_not_mixed_up"
CHUNKS = "test_a_prompt_that_was_computed_in_chunks"
PREEMPTED = "test_a_prompt_that_was_preempted"
ABORTED = "test_a_prompt_that_was_not_finished_frees_its_blocks"
FAILED_STEP = "test_what_a_failed_step_computed_is_not_found"
RANKS = "test_each_rank_gets_its_own_heads"
ABORTED_LOAD = "test_a_load_that_is_aborted_frees_its_blocks_once"
DAMAGED = "test_a_damaged_store_is_a_failed_load"
BEFORE, WHILE = ("before it is asked for",), ("after the load was ordered",)
OF_P0 = "has the values of token 0 of request 'p0'"

BUGS = [
    Bug(
        "ReportsASaveTwice", ONCE, ANY, r"step \d+ names request 'p .*' in finished_sending, and step \d+ had"
    ),
    Bug("ReportsASaveOfNothing", UNDER_WAY, ANY, "in finished_sending; its blocks are not held for it"),
    Bug("DoesNotReportAFailedLoad", BYTES, DAMAGED, f"{POISON}.*; no error was reported", BEFORE),
    Bug("ReportsAFailedLoadTooLate", BYTES, DAMAGED, POISON, BEFORE),
    Bug("NamesOtherBlocksAsFailed", FAILED_BLOCKS, DAMAGED, "names blocks", BEFORE),
    Bug("FreesBeforeItCopiedConnector", BYTES, ANY, POISON),
    Bug(
        "LoadsTheLastToken", LAST_TOKEN, ANY, r"\(4, False\) .* with 4 prompt tokens, of which the node has 0"
    ),
    Bug(
        "LoadsABlockTooFew",
        WHOLE_BLOCKS,
        ANY,
        r"0 of 5 tokens were loaded .*, 4 are the whole blocks",
        ends=False,
    ),
    Bug("CountsTokensThatItLacks", BYTES, ANY, POISON),
    Bug("LoadsMoreThanThePrompt", NOT_MORE, HERE, "with 18 prompt tokens, of which the node has 4"),
    Bug("LoadsFromTheFirstBlock", BYTES, HERE, "token 4 .* has the values of token 0"),
    Bug("WritesWhatIsHere", ORDERED, HERE, "block 31, which request .* uses, was overwritten"),
    Bug("IgnoresTheSalt", BYTES, SEPARATES, OF_P0, (SEPARATE["cache_salt"],)),
    Bug("IgnoresTheAdapter", BYTES, SEPARATES, OF_P0, (SEPARATE["lora_id"],)),
    Bug("IgnoresItems", BYTES, SEPARATES, "of request 'p0'", (SEPARATE["mm_features"],)),
    Bug("IgnoresWhereItemsAre", BYTES, SEPARATES, "of request 'p2'", (SEPARATE["offset of mm_features"],)),
    Bug("IgnoresVectors", BYTES, SEPARATES, OF_P0, (SEPARATE["prompt_embeds"],)),
    Bug("IgnoresTheModel", BYTES, "test_another_models_cache_is_not_loaded", "of request 'p'"),
    Bug("IgnoresEarlierBlocks", BYTES, SIMILAR, "has the values of token 4 of request 'p6'"),
    Bug("IgnoresTheOrderOfTokens", BYTES, SIMILAR, "'its blocks are swapped'"),
    Bug("KeepsEightBitsOfATokenId", BYTES, SIMILAR, r"'its first token differs by 2 \*\* 8'"),
    Bug("KeepsSixteenBitsOfATokenId", BYTES, SIMILAR, r"'its first token differs by 2 \*\* 16'"),
    Bug("KeepsThirtyOneBitsOfATokenId", BYTES, SIMILAR, r"'its first token differs by 2 \*\* 31'"),
    Bug(
        "HandsOutOnce",
        "get_num_new_matched_tokens has no side effects",
        "test_asking_changes_nothing",
        "answered",
    ),
    Bug("LosesOrdersWithoutALoad", RELEASED, ANY, "blocks held for", ends=False),
    Bug("LosesSavesBesideALoad", WHOLE_BLOCKS, BESIDE, "0 of 18 tokens were loaded", ends=False),
    Bug("ChangesItsOrdersLater", "orders are not changed after", ANY, "they were changed to Orders"),
    Bug("ChangesTheStep", "build_connector_meta does not change its argument", ANY, "was changed to Step"),
    Bug("SendsALock", "orders can be sent to another process", ANY, "cannot pickle '_thread.lock' object"),
    Bug("MixesUpRequests", BYTES, SEVERAL, "has the values of token 0 of request 'p2'"),
    Bug("KeepsBlocksOfAbortedPrompts", ENDS, ABORTED, "blocks held for", ends=False),
    Bug("SavesWhatWasNotComputed", BYTES, ABORTED, POISON),
    Bug("ServesDamagedPages", BYTES, DAMAGED, "has values of no token", BEFORE),
    Bug("PadsShortPages", BYTES, DAMAGED, "elements are those of a free block", WHILE, damage=cut_short),
    Bug("OverwritesTheNextBlock", ORDERED, ANY, "block .*, which request 'd .*' uses, was overwritten"),
    Bug("UsesTheNullBlock", ORDERED, ANY, "block 0, which every engine uses as padding, was overwritten"),
    Bug(
        "ShutsDownOnce",
        "a half can be shut down",
        "test_shutting_down_is_harmless_at_any_time",
        "twice raised",
    ),
    Bug(
        "IgnoresUnknownOptions", "an unknown option is refused", "test_an_unknown_option_is_named", "was made"
    ),
    Bug("ReturnsParamsThatAreNoJson", "kv_transfer_params can be sent to a client as JSON", ANY, "not JSON"),
    Bug("ReportsALoadTwice", ONCE, ANY, "in finished_recving, and step"),
    Bug("ReportsBeforeTheBytes", BYTES, ANY, f"{POISON}.*; no error was reported"),
    Bug(
        "WritesAfterAnAbortConnector",
        AFTER_THE_END,
        ABORTED_LOAD,
        "the load of request 'd1' into it was over",
    ),
    Bug("ForgetsAbortedLoadsConnector", ENDS, ABORTED_LOAD, r"loads not over \['d1'\]", ends=False),
    Bug("ForgetsFailedLoads", ANSWER, DAMAGED, r"loads not over \['d'\]", BEFORE, ends=False),
    Bug("DiesOfADamagedPage", ANSWER, DAMAGED, r"loads not over \['d'\]", BEFORE, ends=False),
    Bug("SavesAfterTheReport", BYTES, ANY, POISON),
    Bug("NeverReportsASave", RELEASED, ANY, "blocks held for", ends=False),
    Bug("LoadsAllButTheLastBlock", BYTES, ANY, POISON),
    Bug("NeverSaysHowMuch", ANSWER, ANY, "waiting, 0 tokens computed", ends=False),
    Bug("WritesAfterShutdown", ORDERED, ANY, "block 0"),
    Bug("ClearsThePool", ORDERED, ANY, "was overwritten"),
    Bug("DoesNotWaitForALayer", LAYER, ANY, f"after it returned, token 0 .*layer 0.* {POISON}"),
    Bug("WaitsForAnotherLayer", LAYER, ANY, "after it returned, token 0 .*layer 2"),
    Bug("DoesNotWaitForASave", BYTES, ANY, POISON),
    Bug("SavesBeforeTheLayerIsComputed", BYTES, ANY, POISON),
    Bug("SavesTheFirstLayerOnly", BYTES, ANY, r"layer 1.* has the values of token 0 of .* in layer 0"),
    Bug("SavesAnotherRequestsTokens", BYTES, f"{SEVERAL}_in_chunks", "of request 'd1'.* of request 'p0'"),
    Bug("SavesTheLastChunkOnly", WHOLE_BLOCKS, CHUNKS, "0 of 18 tokens were loaded", ends=False),
    Bug("TakesTheTableForNewBlocks", BYTES, CHUNKS, "has the values of token 0"),
    Bug("IgnoresPreemptions", BYTES, PREEMPTED, rf"token 0 of request 'd1' .*{POISON}"),
    Bug("SavesAllLayersAtTheEnd", BYTES, FAILED_STEP, "has values of no token", (1,)),
    Bug("KeepsTheStepOfAFailedHook", BYTES, FAILED_STEP, "has the values of token 0 of request .other", (1,)),
    Bug("IgnoresHookErrors", WHOLE_BLOCKS, FAILED_STEP, "0 of 18 tokens were loaded", (2,)),
    Bug("SharesFilesBetweenRanks", BYTES, RANKS, "has values of no token", (1 << 20,)),
    Bug("LoadsOnTheFirstRankOnly", BYTES, RANKS, "16 of 32 elements are those of a free", (1 << 20,)),
]


#: Bugs that the simulator plants into the handoff protocol, in a real connector: the class, the test, and
#: what is reported.
HANDOFF_BUGS = [
    (
        simulated.NeverExpires,
        "test_a_lease_that_ran_out_is_stale",
        f"{ENDS} in time",
        r"blocks held for \['p'\]",
    ),
    (
        simulated.ReportsTwice,
        "test_the_counters_count",
        "each load has one record",
        r"\[\(5, ''\), \(5, ''\)\]",
    ),
    (
        simulated.ForgetsLoadsOfLostPeers,
        "test_no_node_at_the_address",
        f"{ENDS} in time",
        r"loads not over \['d'\]",
    ),
    (simulated.CountsWhatIsNotComputed, "test_a_prompt_is_loaded_while_it_is_computed", BYTES, POISON),
    (simulated.ReadsWhateverIsGranted, SIMILAR, BYTES, OF_P0),
    (
        simulated.NeverGivesUp,
        "test_an_offer_that_is_never_made_is_given_up",
        f"{ENDS} in time",
        r"loads not over \['d'\]",
    ),
]


def run(bug: Bug, folder: Path) -> None:
    """Run one test of the suite on a connector with a planted bug."""
    transfer = {
        "kv_connector": f"BrokenBy{bug.name}",
        "kv_connector_module_path": bugs.__name__,
        "kv_connector_extra_config": {"folder": str(folder)},
    }
    test = getattr(ConnectorConformance(), bug.test)
    fixtures = (
        {"damage": lambda: bug.damage(folder)} if "damage" in inspect.signature(test).parameters else {}
    )
    names = [name for name in inspect.signature(test).parameters if name not in {"make_node", "damage"}]
    with node_maker(transfer, deadline_s=5.0 if bug.ends else 0.6) as make_node:
        test(make_node=make_node, **fixtures, **dict(zip(names, bug.arguments, strict=True)))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_reported(bug: Bug, tmp_path: Path) -> None:
    with pytest.raises(BrokenPromiseError) as caught:
        run(bug, tmp_path)
    assert re.match(bug.promise, caught.value.promise)
    assert re.search(bug.seen, caught.value.seen)
    assert bug.promise not in caught.value.seen


@pytest.mark.parametrize(("bug", "test", "promise", "seen"), HANDOFF_BUGS)
def test_a_bug_of_the_simulator_is_reported(
    bug: type[ProducerProtocol | ConsumerProtocol],
    test: str,
    promise: str,
    seen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = ProducerProtocol if issubclass(bug, ProducerProtocol) else ConsumerProtocol
    monkeypatch.setattr(worker, broken.__name__, bug)
    with (
        pytest.raises(BrokenPromiseError) as caught,
        node_maker({"kv_connector": "inproc"}, 0.5) as make_node,
    ):
        getattr(HandoffConformance(), test)(make_node=make_node)
    assert re.match(promise, caught.value.promise)
    assert re.search(seen, caught.value.seen)


class TestStoreOfSeveralRanks(ConnectorConformance):
    """The store from which the bugs of several ranks derive has none of them."""

    @pytest.fixture
    def transfer(self, tmp_path: Path) -> Mapping[str, Any]:
        return {
            "kv_connector": "Ranks",
            "kv_connector_module_path": bugs.__name__,
            "kv_connector_extra_config": {"folder": str(tmp_path)},
        }


@pytest.mark.parametrize(
    ("half", "left"),
    [
        ("LeaksAThread", r"thread .*block-store-load.*block_store"),
        ("LeaksADescriptor", "descriptor .*/dev/null"),
    ],
)
def test_a_planted_leak_is_reported(half: str, left: str, tmp_path: Path) -> None:
    leaks = Leaks()
    run(Bug(half, "", ANY, ""), tmp_path)
    found = "; ".join(leaks.wait(0.1))
    getattr(bugs, half).end()
    assert re.search(left, found)


class DamagesNothing(ConnectorConformance):
    @pytest.fixture
    def transfer(self, tmp_path: Path) -> Mapping[str, Any]:
        return {
            "kv_connector": "BlockStoreConnector",
            "kv_connector_module_path": "block_store",
            "kv_connector_extra_config": {"folder": str(tmp_path)},
        }

    @pytest.fixture
    def damage(self) -> Any:
        return None


def test_a_fixture_that_returns_none_is_a_reason_to_skip(tmp_path: Path) -> None:
    class Recorder:
        text = ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            self.text += str(report.longrepr or "")

    recorder = Recorder()
    (tmp_path / "test_connector_without.py").write_text(
        f"import sys\nTestNone = sys.modules[{__name__!r}].DamagesNothing\n"
    )
    off = [f"-pno:{name}" for name in ("terminal", "cacheprovider", "asyncio", "faulthandler", "xdist")]
    arguments = [*off, "--rootdir", str(tmp_path), "-c", "/dev/null", "-k", "damaged", str(tmp_path)]
    assert pytest.main(arguments, plugins=[recorder]) == pytest.ExitCode.OK, recorder.text
    assert "this test needs `damage`, and the fixture returned None" in recorder.text
