"""The conformance suite reports the broken promise of each planted bug. `tests/examples` has the stores without a bug."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvferry.connector import KVConnectorBase
from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.producer import ProducerProtocol
from kvferry.connector.p2p import worker
from kvferry.connector.testing import BrokenPromiseError, ConnectorConformance, HandoffConformance
from kvferry.connector.testing.harness import node_maker
from kvferry.connector.testing.loads import SEPARATE
from kvferry.transports.testing.leaks import Leaks
from tests.support import planted_bugs
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
        half: A class of `planted_bugs`.
        test: The test of the suite that must fail.
        promise: The beginning of the promise that it names.
        seen: A pattern of what it says was seen.
        arguments: Of the test, besides its fixtures.
        ends: Whether the bug is seen at once; otherwise, after the suite's deadline.
    """

    half: str
    test: str
    promise: str
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
ABORTED_LOAD = "test_a_load_that_is_aborted_frees_its_blocks_once"
DAMAGED = "test_a_damaged_store_is_a_failed_load"
BEFORE, WHILE = ("before it is asked for",), ("after the load was ordered",)
OF_P0 = "has the values of token 0 of request 'p0'"

BUGS = [
    # A store that works within a step.
    Bug(
        "ReportsASaveTwice", ANY, ONCE, r"step \d+ names request 'p .*' in finished_sending, and step \d+ had"
    ),
    Bug("ReportsASaveOfNothing", ANY, UNDER_WAY, "in finished_sending; its blocks are not held for it"),
    Bug("DoesNotReportAFailedLoad", DAMAGED, BYTES, f"{POISON}.*; no error was reported", BEFORE),
    Bug("ReportsAFailedLoadTooLate", DAMAGED, BYTES, POISON, BEFORE),
    Bug("NamesOtherBlocksAsFailed", DAMAGED, FAILED_BLOCKS, "names blocks", BEFORE),
    Bug("FreesBeforeItCopiedConnector", ANY, BYTES, POISON),
    Bug(
        "LoadsTheLastToken", ANY, LAST_TOKEN, r"\(4, False\) .* with 4 prompt tokens, of which the node has 0"
    ),
    Bug(
        "LoadsABlockTooFew",
        ANY,
        WHOLE_BLOCKS,
        r"0 of 5 tokens were loaded .*, 4 are the whole blocks",
        ends=False,
    ),
    Bug("CountsTokensThatItLacks", ANY, BYTES, POISON),
    Bug("LoadsMoreThanThePrompt", HERE, NOT_MORE, "with 18 prompt tokens, of which the node has 4"),
    Bug("LoadsFromTheFirstBlock", HERE, BYTES, "token 4 .* has the values of token 0"),
    Bug("WritesWhatIsHere", HERE, BYTES, f"token 4 .*{POISON}"),
    Bug("IgnoresTheSalt", SEPARATES, BYTES, OF_P0, (SEPARATE["cache_salt"],)),
    Bug("IgnoresTheAdapter", SEPARATES, BYTES, OF_P0, (SEPARATE["lora_id"],)),
    Bug("IgnoresItems", SEPARATES, BYTES, "of request 'p0'", (SEPARATE["mm_features"],)),
    Bug("IgnoresWhereItemsAre", SEPARATES, BYTES, "of request 'p2'", (SEPARATE["offset of mm_features"],)),
    Bug("IgnoresVectors", SEPARATES, BYTES, OF_P0, (SEPARATE["prompt_embeds"],)),
    Bug("IgnoresTheModel", "test_another_models_cache_is_not_loaded", BYTES, "of request 'p'"),
    Bug("IgnoresEarlierBlocks", SIMILAR, BYTES, "has the values of token 4 of request 'p6'"),
    Bug("IgnoresTheOrderOfTokens", SIMILAR, BYTES, "'its blocks are swapped'"),
    Bug("KeepsEightBitsOfATokenId", SIMILAR, BYTES, r"'its first token differs by 2 \*\* 8'"),
    Bug("KeepsSixteenBitsOfATokenId", SIMILAR, BYTES, r"'its first token differs by 2 \*\* 16'"),
    Bug("KeepsThirtyOneBitsOfATokenId", SIMILAR, BYTES, r"'its first token differs by 2 \*\* 31'"),
    Bug(
        "HandsOutOnce",
        "test_asking_changes_nothing",
        "get_num_new_matched_tokens has no side effects",
        "answered",
    ),
    Bug("LosesOrdersWithoutALoad", ANY, RELEASED, "blocks held for", ends=False),
    Bug("LosesSavesBesideALoad", BESIDE, WHOLE_BLOCKS, "0 of 18 tokens were loaded", ends=False),
    Bug("ChangesItsOrdersLater", ANY, "orders are not changed after", "they were changed to Orders"),
    Bug("ChangesTheStep", ANY, "build_connector_meta does not change its argument", "was changed to Step"),
    Bug("SendsALock", ANY, "orders can be sent to another process", "cannot pickle '_thread.lock' object"),
    Bug("MixesUpRequests", SEVERAL, BYTES, "has the values of token 0 of request 'p2'"),
    Bug("KeepsBlocksOfAbortedPrompts", ABORTED, ENDS, "blocks held for", ends=False),
    Bug("SavesWhatWasNotComputed", ABORTED, BYTES, POISON),
    Bug("ServesDamagedPages", DAMAGED, BYTES, "has values of no token", BEFORE),
    Bug("PadsShortPages", DAMAGED, BYTES, "elements are those of a free block", WHILE, damage=cut_short),
    Bug("OverwritesTheNextBlock", ANY, ORDERED, "block .*, which is free, was overwritten"),
    Bug("UsesTheNullBlock", ANY, ORDERED, "block 0, which every engine uses as padding, was overwritten"),
    Bug(
        "ShutsDownOnce",
        "test_shutting_down_is_harmless_at_any_time",
        "a half can be shut down",
        "twice raised",
    ),
    Bug(
        "IgnoresUnknownOptions", "test_an_unknown_option_is_named", "an unknown option is refused", "was made"
    ),
    Bug("ReturnsParamsThatAreNoJson", ANY, "kv_transfer_params can be sent to a client as JSON", "not JSON"),
    Bug(
        "CannotJudgeParams",
        "test_foreign_params_are_judged_without_an_error",
        "recognizes_params answers True or False",
        "None about",
    ),
    # A store with a thread.
    Bug("ReportsALoadTwice", ANY, ONCE, "in finished_recving, and step"),
    Bug("ReportsBeforeTheBytes", ANY, BYTES, f"{POISON}.*; no error was reported"),
    Bug(
        "WritesAfterAnAbortConnector",
        ABORTED_LOAD,
        AFTER_THE_END,
        "the load of request 'd1' into it was over",
    ),
    Bug("ForgetsAbortedLoadsConnector", ABORTED_LOAD, ENDS, r"loads not over \['d1'\]", ends=False),
    Bug("ForgetsFailedLoads", DAMAGED, ANSWER, r"loads not over \['d'\]", BEFORE, ends=False),
    Bug("DiesOfADamagedPage", DAMAGED, ANSWER, r"loads not over \['d'\]", BEFORE, ends=False),
    Bug("SavesAfterTheReport", ANY, BYTES, POISON),
    Bug("NeverReportsASave", ANY, RELEASED, "blocks held for", ends=False),
    Bug("LoadsAllButTheLastBlock", ANY, BYTES, POISON),
    Bug("NeverSaysHowMuch", ANY, ANSWER, "waiting, 0 tokens computed", ends=False),
    Bug("WritesAfterShutdown", ANY, ORDERED, "block 0"),
    Bug("ClearsThePool", ANY, ORDERED, "was overwritten"),
    # A store that works layer by layer.
    Bug("DoesNotWaitForALayer", ANY, LAYER, f"after it returned, token 0 .*layer 0.* {POISON}"),
    Bug("WaitsForAnotherLayer", ANY, LAYER, "after it returned, token 0 .*layer 2"),
    Bug("DoesNotWaitForASave", ANY, BYTES, POISON),
    Bug("SavesBeforeTheLayerIsComputed", ANY, BYTES, POISON),
    Bug("SavesTheFirstLayerOnly", ANY, BYTES, r"layer 1.* has the values of token 0 of .* in layer 0"),
    Bug("SavesAnotherRequestsTokens", f"{SEVERAL}_in_chunks", BYTES, "of request 'd1'.* of request 'p0'"),
    Bug("SavesTheLastChunkOnly", CHUNKS, WHOLE_BLOCKS, "0 of 18 tokens were loaded", ends=False),
    Bug("TakesTheTableForNewBlocks", CHUNKS, BYTES, "has the values of token 0"),
    Bug(
        "IgnoresPreemptions",
        PREEMPTED,
        BYTES,
        r"token 0 of request 'd1' .* has the values of token \d+ of request 'p1'",
    ),
]


#: Bugs that the simulator plants into the handoff protocol, in a real connector: the class, the test, and what is reported.
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

_NO_READ_AT_WILL = (
    "shows only if a read is under way when its blocks are freed; the suite cannot hold back a read of any transport. "
    "tests/connector/test_faults.py does so with a faulty transport, and the suite of transports checks the guard itself"
)
_OTHER_WEIGHTS = (
    "the suite has no model; tests/connector/test_changed_weights.py has nodes whose weights change"
)
_ONE_RANK = "needs a node of several ranks; tests/connector/test_several_ranks.py has them"

#: Bugs of the simulator that the suite cannot find, and why. Each of a kind that a store can have is in `BUGS` as well.
WITHOUT_COUNTERPART: dict[type[object], str] = {
    simulated.FreesBeforeItClears: _NO_READ_AT_WILL,
    simulated.NeverClears: _NO_READ_AT_WILL,
    simulated.UsesOneGuardValue: _NO_READ_AT_WILL,
    simulated.ForgetsToExtendGuards: "a store decides by itself whom it gives what",
    simulated.ExpectsOneGuardValue: _NO_READ_AT_WILL,
    simulated.AcceptsStaleBytes: f"{_NO_READ_AT_WILL}; of a store: DoesNotReportAFailedLoad",
    simulated.ReportsBeforeTheReadEnded: f"{_NO_READ_AT_WILL}; of a store: ReportsBeforeTheBytes, WritesAfterAnAbort",
    simulated.AwaitsRequestsForever: "the suite has no rendezvous, because a connector need not have any",
    simulated.KeepsOffersOfOtherWeights: _OTHER_WEIGHTS,
    simulated.KeepsLoadsOfOtherWeights: _OTHER_WEIGHTS,
    simulated.ForgetsWhatItAnnounced: "costs memory, and changes nothing that an engine sees",
    simulated.ForgetsProgressWhileItReads: _NO_READ_AT_WILL,
    simulated.ForgetsClaimsThatCameFirst: _ONE_RANK,
    simulated.ReportsWithTheFirstPart: _ONE_RANK,
    simulated.DeliversToTheFirstRank: _ONE_RANK,
    simulated.ReleasesTheFirstRankOnly: _ONE_RANK,
}


def run(bug: Bug, folder: Path) -> None:
    """Run one test of the suite on a connector with a planted bug."""
    is_half = not issubclass(getattr(planted_bugs, bug.half), KVConnectorBase)
    transfer = {
        "kv_connector": f"BrokenBy{bug.half}" if is_half else bug.half,
        "kv_connector_module_path": "tests.support.planted_bugs",
        "kv_connector_extra_config": {"folder": str(folder)},
    }
    test = getattr(ConnectorConformance(), bug.test)
    fixtures = (
        {"damage": lambda: bug.damage(folder)} if "damage" in inspect.signature(test).parameters else {}
    )
    names = [name for name in inspect.signature(test).parameters if name not in {"make_node", "damage"}]
    with node_maker(transfer, deadline_s=5.0 if bug.ends else 0.6) as make_node:
        test(make_node=make_node, **fixtures, **dict(zip(names, bug.arguments, strict=True)))


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.half)
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


@pytest.mark.parametrize(
    ("half", "left"),
    [
        ("LeaksAThread", r"thread .*block-store-load.*block_store_connector"),
        ("LeaksADescriptor", "descriptor .*/dev/null"),
    ],
)
def test_a_planted_leak_is_reported(half: str, left: str, tmp_path: Path) -> None:
    leaks = Leaks()
    run(Bug(half, ANY, "", ""), tmp_path)
    found = "; ".join(leaks.wait(0.1))
    getattr(planted_bugs, half).end()
    assert re.search(left, found)


def test_each_bug_of_the_simulator_is_planted_or_has_no_counterpart() -> None:
    known = {bug for bug, *_ in HANDOFF_BUGS} | WITHOUT_COUNTERPART.keys()
    planted = {
        bug
        for bug in vars(simulated).values()
        if isinstance(bug, type) and bug.__module__ == simulated.__name__
        if issubclass(bug, (ProducerProtocol, ConsumerProtocol))
    }
    assert planted == known
