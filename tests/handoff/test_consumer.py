"""Every row of the consumer's state table, and the cases between the rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvferry.connector.errors import ContentMismatchError, RendezvousError, StaleLeaseError
from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.events import (
    Action,
    Disconnect,
    GroupBlocks,
    LoadEnded,
    OfferCompleted,
    Send,
    StartRead,
)
from kvferry.connector.handoff.loads import Load
from kvferry.connector.handoff.messages import (
    MAX_GROUP_BLOCKS,
    Claim,
    Deny,
    Grant,
    Heartbeat,
    Parked,
    Progress,
    Release,
    Revoke,
    Welcome,
)
from kvferry.transports.errors import (
    KVTransferError,
    PeerLostError,
    ProtocolError,
    StaleRegionError,
    TransferTimeoutError,
    TransportClosedError,
)
from kvferry.transports.regions import Guard
from tests.support.handoff_simulator.load_states import (
    BLOCKS,
    GRANT,
    OFFER,
    PEER,
    READ,
    Reach,
    claiming,
    connecting,
    draining,
    granted,
    only_end,
    only_message,
    reading,
)
from tests.support.ranks import ONLY_RANK

before_reading = pytest.mark.parametrize("reach", [connecting, claiming, granted])
after_the_handshake = pytest.mark.parametrize("reach", [claiming, granted])


def test_a_claim_connects_shakes_hands_and_claims(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    claiming(consumer, welcome)
    assert consumer.num_loads == 1


def test_a_second_claim_uses_the_session(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    claiming(consumer, welcome)
    another = replace(OFFER, lease=4, request_id="another")
    assert only_message(consumer.claim("ours too", another, 1.0)) == Claim("another", 4, **ONLY_RANK)


def test_claims_that_wait_for_one_connection_are_all_sent(
    consumer: ConsumerProtocol, welcome: Welcome
) -> None:
    connecting(consumer, welcome)
    assert consumer.claim("ours too", replace(OFFER, lease=4), 1.0) == []
    sent = [action.message for action in consumer.receive(PEER, welcome, 1.0) if isinstance(action, Send)]
    assert sent == [Claim("theirs", 3, **ONLY_RANK), Claim("theirs", 4, **ONLY_RANK)]


def test_a_granted_offer_is_read_into_the_blocks_that_were_asked_for(
    consumer: ConsumerProtocol, welcome: Welcome
) -> None:
    granted(consumer, welcome)
    (read,) = consumer.load("ours", BLOCKS, 1.0)
    assert isinstance(read, StartRead)
    assert (read.request_id, read.peer_id, read.timeout_s) == ("ours", PEER, 20.0)
    assert read.guard == Guard(index=1, value=3)
    # Local blocks 31 and 32 from the granted blocks 15 and 16: one run of two blocks of two 8-byte pages.
    assert read.pairs.table.tolist() == [[31 * 16, 15 * 16, 32]]
    assert read.num_regions_per_layer == 2
    assert consumer.num_reads == 1


@pytest.mark.parametrize("reach", [connecting, claiming])
def test_a_load_that_comes_before_the_grant_waits_for_it(
    consumer: ConsumerProtocol, welcome: Welcome, reach: Reach
) -> None:
    reach(consumer, welcome)
    assert consumer.load("ours", BLOCKS, 0.0) == []
    if reach is connecting:
        consumer.receive(PEER, welcome, 0.0)
    (read,) = consumer.receive(PEER, GRANT, 0.0)
    assert isinstance(read, StartRead)


def test_a_read_that_succeeds_is_released_and_reported(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    reading(consumer, welcome)
    released, ended = consumer.read_ended(READ, None, 1.0)
    assert released == Send(PEER, Release("theirs", 3, delivered=True, **ONLY_RANK))
    assert ended == LoadEnded("ours", "loaded", None, BLOCKS)
    assert (consumer.num_loads, consumer.num_reads) == (0, 0)


def test_a_read_that_fails_is_released_and_reported(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    reading(consumer, welcome)
    stale = StaleRegionError("the guard changed")
    released, ended = consumer.read_ended(READ, stale, 1.0)
    assert released == Send(PEER, Release("theirs", 3, delivered=False, **ONLY_RANK))
    assert ended == LoadEnded("ours", "failed", stale, BLOCKS)


def test_the_reason_of_a_producer_cannot_forge_a_line_of_the_log(
    consumer: ConsumerProtocol, welcome: Welcome
) -> None:
    reading(consumer, welcome)
    consumer.receive(PEER, Deny("theirs", 3, "over\nforged\x1b[2J"), 1.0)
    (*_, ended) = consumer.read_ended(READ, None, 1.0)
    assert isinstance(ended, LoadEnded)
    assert str(ended.error) == "over\\nforged\\x1b[2J"


Ending = Callable[[ConsumerProtocol], list[Action]]
PRODUCER_ENDS: list[tuple[str, Ending, type[KVTransferError]]] = [
    ("deny", lambda c: c.receive(PEER, Deny("theirs", 3, "over"), 1.0), StaleLeaseError),
    ("revoke", lambda c: c.receive(PEER, Revoke("theirs", 3, "expired"), 1.0), StaleLeaseError),
    ("lost", lambda c: c.peer_lost(PEER, PeerLostError("gone"), 1.0), PeerLostError),
]
producer_ends = pytest.mark.parametrize(
    ("end", "error"), [case[1:] for case in PRODUCER_ENDS], ids=[case[0] for case in PRODUCER_ENDS]
)


@after_the_handshake
@producer_ends
def test_an_end_before_the_load_is_reported_when_the_load_comes(
    consumer: ConsumerProtocol, welcome: Welcome, reach: Reach, end: Ending, error: type[KVTransferError]
) -> None:
    reach(consumer, welcome)
    assert not any(isinstance(action, Send | LoadEnded) for action in end(consumer))
    ended = only_end(consumer.load("ours", BLOCKS, 2.0))
    assert (ended.outcome, type(ended.error), ended.blocks) == ("failed", error, BLOCKS)
    assert consumer.num_loads == 0


@producer_ends
def test_an_end_before_the_grant_is_reported_at_once_if_there_are_blocks(
    consumer: ConsumerProtocol, welcome: Welcome, end: Ending, error: type[KVTransferError]
) -> None:
    claiming(consumer, welcome)
    consumer.load("ours", BLOCKS, 0.0)
    ended = only_end(end(consumer))
    assert (ended.outcome, type(ended.error)) == ("failed", error)


@producer_ends
@pytest.mark.parametrize("read_error", [None, StaleRegionError("changed")])
def test_an_end_while_reading_is_reported_when_the_read_ended(
    consumer: ConsumerProtocol,
    welcome: Welcome,
    end: Ending,
    error: type[KVTransferError],
    read_error: KVTransferError | None,
) -> None:
    reading(consumer, welcome)
    assert not any(isinstance(action, Send | LoadEnded) for action in end(consumer))
    (ended,) = consumer.read_ended(READ, read_error, 2.0)
    assert isinstance(ended, LoadEnded)
    assert (ended.outcome, type(ended.error)) == ("failed", error)


@after_the_handshake
def test_a_drop_releases_the_offer(consumer: ConsumerProtocol, welcome: Welcome, reach: Reach) -> None:
    reach(consumer, welcome)
    assert only_message(consumer.drop("ours", 1.0)) == Release("theirs", 3, delivered=False, **ONLY_RANK)
    assert consumer.num_loads == 0
    assert consumer.drop("ours", 2.0) == []


def test_a_drop_before_the_handshake_releases_the_offer_after_it(
    consumer: ConsumerProtocol, welcome: Welcome
) -> None:
    connecting(consumer, welcome)
    assert consumer.drop("ours", 0.0) == []
    # A producer accepts a release only from the rank that claimed the offer.
    assert consumer.receive(PEER, welcome, 0.0) == [
        Send(PEER, Claim("theirs", 3, **ONLY_RANK)),
        Send(PEER, Release("theirs", 3, delivered=False, **ONLY_RANK)),
    ]


def test_an_offer_of_another_content_is_not_read(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    """The granted blocks are intact, but they belong to another prompt."""
    claiming(consumer, welcome)
    consumer.load("ours", BLOCKS, 0.0)
    released, ended = consumer.receive(PEER, replace(GRANT, content="of another prompt"), 1.0)
    assert released == Send(PEER, Release("theirs", 3, delivered=False, **ONLY_RANK))
    assert isinstance(ended, LoadEnded)
    assert (ended.outcome, type(ended.error)) == ("failed", ContentMismatchError)


def test_an_offer_of_another_content_is_remembered_until_there_are_blocks(
    consumer: ConsumerProtocol, welcome: Welcome
) -> None:
    claiming(consumer, welcome)
    released = only_message(consumer.receive(PEER, replace(GRANT, content="of another prompt"), 1.0))
    assert released == Release("theirs", 3, delivered=False, **ONLY_RANK)
    assert isinstance(only_end(consumer.load("ours", BLOCKS, 2.0)).error, ContentMismatchError)


def test_a_parked_claim_waits_while_its_producer_says_so(
    consumer: ConsumerProtocol, welcome: Welcome, config: HandoffConfig
) -> None:
    claiming(consumer, welcome)
    now = 0.0
    for _ in range(100):
        now += config.claim_timeout_s * 0.9
        assert consumer.receive(PEER, Parked("theirs", 3), now) == []
        consumer.advance(now)
    consumer.load("ours", BLOCKS, now)
    assert isinstance(consumer.receive(PEER, GRANT, now)[0], StartRead)


def test_a_rendezvous_gives_its_blocks_up_if_others_wait_for_blocks_as_long(
    consumer: ConsumerProtocol, welcome: Welcome, config: HandoffConfig
) -> None:
    patience = config.progress_wait_s
    granted(consumer, welcome)
    for number, name in enumerate(("one", "other"), 4):
        met = replace(OFFER, lease=number, request_id=name, is_rendezvous=True)
        consumer.claim(name, met, 0.0)
        consumer.load(name, BLOCKS, 0.0)
    assert consumer.receive(PEER, Parked("one", 4), patience - 0.1) == []
    (ended,) = [
        each for each in consumer.receive(PEER, Parked("one", 4), patience) if isinstance(each, LoadEnded)
    ]
    assert isinstance(ended.error, RendezvousError)
    # The other one goes on: one at a time.
    assert consumer.receive(PEER, Parked("other", 5), patience) == []
    # Nobody waits for blocks any more.
    consumer.load("ours", BLOCKS, patience)
    assert consumer.receive(PEER, Parked("other", 5), 3 * patience) == []


@pytest.mark.parametrize("is_parked", [True, False])
def test_the_time_of_a_rendezvous_begins_when_its_prompt_is_computed(
    consumer: ConsumerProtocol, welcome: Welcome, is_parked: bool
) -> None:
    """A claim that is granted at once has waited for nothing, so all of its time is the transfer's."""
    claiming(consumer, welcome)
    consumer.claim("one", replace(OFFER, lease=4, request_id="one", is_rendezvous=True), 0.0)
    consumer.load("one", BLOCKS, 0.0)
    if is_parked:
        assert consumer.receive(PEER, Parked("one", 4), 1.0) == []
    *completed, read = consumer.receive(PEER, replace(GRANT, request_id="one", lease=4), 2.0)
    assert isinstance(read, StartRead)
    assert completed == [OfferCompleted("one")] * is_parked


def test_the_wait_for_a_silent_producer_is_bounded(
    consumer: ConsumerProtocol, welcome: Welcome, config: HandoffConfig
) -> None:
    claiming(consumer, welcome)
    consumer.receive(PEER, Parked("theirs", 3), 8.0)
    consumer.load("ours", BLOCKS, 8.0)
    assert consumer.num_loads == 1
    assert isinstance(only_end(consumer.advance(8.0 + config.claim_timeout_s)).error, TransferTimeoutError)


def test_after_a_drop_before_the_handshake_nothing_is_sent_to_a_restarted_node(
    consumer: ConsumerProtocol, welcome: Welcome
) -> None:
    connecting(consumer, welcome)
    consumer.drop("ours", 0.0)
    assert consumer.receive(PEER, replace(welcome, epoch=23), 0.0) == []


@pytest.mark.parametrize("reach", [connecting, claiming])
def test_a_drop_is_reported_if_there_are_blocks(
    consumer: ConsumerProtocol, welcome: Welcome, reach: Reach
) -> None:
    reach(consumer, welcome)
    consumer.load("ours", BLOCKS, 0.0)
    assert only_end(consumer.drop("ours", 1.0)) == LoadEnded("ours", "dropped", None, BLOCKS)


@pytest.mark.parametrize("read_error", [None, StaleRegionError("changed")])
def test_a_drop_while_reading_is_reported_when_the_read_ended(
    consumer: ConsumerProtocol, welcome: Welcome, read_error: KVTransferError | None
) -> None:
    draining(consumer, welcome)
    assert consumer.num_reads == 1
    released, ended = consumer.read_ended(READ, read_error, 1.0)
    assert released == Send(PEER, Release("theirs", 3, delivered=False, **ONLY_RANK))
    assert ended == LoadEnded("ours", "dropped", None, BLOCKS)


# -- while the prompt is computed --------------------------------------------------------------------

EARLY = Grant("theirs", 3, guard_index=1, num_tokens=12, num_ready=8, block_ids=((14, 15),))
ALL = (GroupBlocks(0, (30, 31, 32)),)


def waiting(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    """Two of three blocks are read, and the third is not computed yet."""
    claiming(consumer, welcome)
    assert consumer.receive(PEER, EARLY, 0.0) == []
    (read,) = consumer.load("ours", ALL, 0.0)
    assert isinstance(read, StartRead)
    assert read.pairs.table.tolist() == [[30 * 16, 14 * 16, 32]]
    assert consumer.read_ended(read, None, 1.0) == []


def test_ready_blocks_are_read_first_and_then_the_rest(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    waiting(consumer, welcome)
    completed, read = consumer.receive(
        PEER, Progress("theirs", 3, num_ready=12, more_block_ids=((16,),)), 2.0
    )
    assert completed == OfferCompleted("ours")
    assert isinstance(read, StartRead)
    assert read.pairs.table.tolist() == [[32 * 16, 16 * 16, 16]]
    assert only_end(consumer.read_ended(read, None, 3.0)).outcome == "loaded"


def test_a_block_is_read_when_its_last_token_is_ready(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    waiting(consumer, welcome)
    assert consumer.receive(PEER, Progress("theirs", 3, num_ready=11, more_block_ids=((16,),)), 2.0) == []
    assert isinstance(
        consumer.receive(PEER, Progress("theirs", 3, num_ready=12, more_block_ids=((),)), 3.0)[-1], StartRead
    )


def test_progress_during_a_read_is_read_after_it(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    claiming(consumer, welcome)
    consumer.receive(PEER, EARLY, 0.0)
    (read,) = consumer.load("ours", ALL, 0.0)
    assert isinstance(read, StartRead)
    assert consumer.receive(PEER, Progress("theirs", 3, num_ready=12, more_block_ids=((16,),)), 1.0) == [
        OfferCompleted("ours")
    ]
    (second,) = consumer.read_ended(read, None, 2.0)
    assert isinstance(second, StartRead)


def test_a_load_whose_producer_is_silent_ends(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    waiting(consumer, welcome)
    assert isinstance(only_end(consumer.advance(31.0)).error, TransferTimeoutError)


def test_a_chunk_may_take_long_while_its_producer_says_that_it_is_computed(
    consumer: ConsumerProtocol, welcome: Welcome, config: HandoffConfig
) -> None:
    waiting(consumer, welcome)
    now = 1.0
    for _ in range(100):
        now += config.progress_wait_s * 0.9
        assert consumer.receive(PEER, Parked("theirs", 3), now) == []
        sent = [action.message for action in consumer.advance(now) if isinstance(action, Send)]
        assert all(isinstance(message, Heartbeat) for message in sent)
    more = Progress("theirs", 3, num_ready=12, more_block_ids=((16,),))
    assert isinstance(consumer.receive(PEER, more, now)[-1], StartRead)


def test_a_rank_that_has_computed_everything_has_nothing_more_to_say() -> None:
    load = Load("ours", replace(OFFER, addresses=("sim://whole", "sim://slow")))
    for part, grant in zip(load.parts, (GRANT, EARLY), strict=True):
        load.claim(part, 1.0)
        load.accept(part, grant, 1.0)
    load.fill(ALL, 0.0)
    load.wait_for_progress(30.0)
    load.keep_waiting(load.parts[1], 60.0)
    load.keep_waiting(load.parts[0], 60.0)
    assert [part.deadline for part in load.parts] == [math.inf, 60.0]


def test_a_producer_that_still_computes_moves_no_other_deadline(
    consumer: ConsumerProtocol, welcome: Welcome, config: HandoffConfig
) -> None:
    """The consumer has no blocks for the load; then a read does not end."""
    claiming(consumer, welcome)
    consumer.receive(PEER, EARLY, 0.0)
    assert consumer.receive(PEER, Parked("theirs", 3), config.load_wait_s - 1) == []
    (read,) = consumer.load("ours", ALL, config.load_wait_s - 1)
    assert isinstance(read, StartRead)
    lost_at = config.load_wait_s - 1 + 2 * config.read_timeout_s
    consumer.receive(PEER, Parked("theirs", 3), lost_at - 1)
    assert Disconnect(PEER) in consumer.advance(lost_at)


def test_without_blocks_a_load_ends_though_its_producer_computes(
    consumer: ConsumerProtocol, welcome: Welcome, config: HandoffConfig
) -> None:
    claiming(consumer, welcome)
    consumer.receive(PEER, EARLY, 0.0)
    consumer.receive(PEER, Parked("theirs", 3), config.load_wait_s - 1)
    consumer.advance(config.load_wait_s)
    assert isinstance(only_end(consumer.load("ours", ALL, config.load_wait_s)).error, TransferTimeoutError)


@pytest.mark.parametrize(
    "progress",
    [
        Progress("theirs", 3, num_ready=8, more_block_ids=((16,),)),
        Progress("theirs", 3, num_ready=13, more_block_ids=((16,),)),
        Progress("theirs", 3, num_ready=12, more_block_ids=((16,), ())),
        Progress("theirs", 3, num_ready=12, more_block_ids=((16,) * MAX_GROUP_BLOCKS,)),
    ],
    ids=["no-more", "too-much", "other-groups", "too-many-blocks"],
)
def test_progress_that_does_not_fit_drops_the_peer(
    consumer: ConsumerProtocol, welcome: Welcome, progress: Progress
) -> None:
    waiting(consumer, welcome)
    actions = consumer.receive(PEER, progress, 2.0)
    assert Disconnect(PEER) in actions
    assert isinstance(only_end(actions).error, ProtocolError)


# -- deadlines ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reach", "deadline", "releases"),
    [(connecting, 4.0, False), (claiming, 10.0, True), (granted, 60.0, True)],
)
def test_every_wait_ends(
    consumer: ConsumerProtocol, welcome: Welcome, reach: Reach, deadline: float, releases: bool
) -> None:
    reach(consumer, welcome)
    assert not any(isinstance(action, Disconnect | LoadEnded) for action in consumer.advance(deadline - 0.1))
    assert consumer.next_deadline() <= deadline
    actions = consumer.advance(deadline)
    assert (Send(PEER, Release("theirs", 3, delivered=False, **ONLY_RANK)) in actions) == releases
    assert (Disconnect(PEER) in actions) != releases
    assert isinstance(only_end(consumer.load("ours", BLOCKS, deadline)).error, TransferTimeoutError)


@pytest.mark.parametrize("reach", [reading, draining])
def test_a_read_that_the_transport_does_not_end_costs_the_peer(
    consumer: ConsumerProtocol, welcome: Welcome, reach: Reach
) -> None:
    reach(consumer, welcome)
    assert Disconnect(PEER) not in consumer.advance(39.9)
    assert Disconnect(PEER) in consumer.advance(40.0)
    assert consumer.num_reads == 1
    outcome = "failed" if reach is reading else "dropped"
    assert only_end(consumer.read_ended(READ, TransportClosedError("closed"), 41.0)).outcome == outcome


def test_leases_are_renewed_while_there_are_any(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    granted(consumer, welcome)
    consumer.claim("ours too", replace(OFFER, lease=4, request_id="another"), 1.0)
    assert consumer.next_deadline() == 5.0
    assert only_message(consumer.advance(5.0)) == Heartbeat((3, 4))
    assert consumer.next_deadline() == 10.0
    consumer.drop("ours", 6.0)
    consumer.drop("ours too", 6.0)
    assert consumer.advance(10.0) == []
    assert consumer.next_deadline() == math.inf
