"""A claim by a name that a router drew may come before the request, waits for it within bounds, and is then
as any claim.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvferry.connector.errors import RendezvousError
from kvferry.connector.handoff.config import HandoffConfig
from kvferry.connector.handoff.consumer import ConsumerProtocol
from kvferry.connector.handoff.events import (
    Action,
    ClaimUnmet,
    Connect,
    GroupBlocks,
    Identity,
    LoadEnded,
    OfferEnded,
    RemoteOffer,
    Send,
    SetGuard,
    StartRead,
)
from kvferry.connector.handoff.messages import Claim, Deny, Grant, Parked, Release, Welcome
from kvferry.connector.handoff.producer import ProducerProtocol
from tests.support.ranks import ONLY_RANK

TABLES = ((4, 5, 6),)
PEER, OTHER = 1, 2
NAME, LEASE, GUARD_VALUE = "5" * 32, 77, 123
CLAIM = Claim(NAME, LEASE, **ONLY_RANK, rendezvous=True)


def denials(actions: list[Action]) -> list[str]:
    sent = [action.message for action in actions if isinstance(action, Send)]
    return [message.reason for message in sent if isinstance(message, Deny)]


def is_parked(actions: list[Action], peer: int = PEER) -> bool:
    return actions == [Send(peer, Parked(NAME, LEASE))]


def made(producer: ProducerProtocol, now: float = 1.0) -> list[Action]:
    return producer.offer("r", LEASE, TABLES, 12, now, "c", GUARD_VALUE)


def test_a_claim_that_comes_before_its_request_is_granted_when_the_offer_is_made(
    producer: ProducerProtocol,
) -> None:
    assert is_parked(producer.receive(PEER, CLAIM, now=0.0))
    assert producer.announce("r", LEASE, NAME, now=1.0) == []
    guarded, granted = producer.open("r", LEASE, TABLES, 12, 4, "c", GUARD_VALUE)
    # The lease number came from outside, so the guard holds a number that the producer drew.
    assert guarded == SetGuard(1, GUARD_VALUE, "r", TABLES)
    assert granted == Send(
        PEER,
        Grant(
            NAME,
            LEASE,
            guard_index=1,
            num_tokens=12,
            num_ready=4,
            block_ids=TABLES,
            content="c",
            guard_value=GUARD_VALUE,
        ),
    )


def test_a_claim_waits_for_its_request_within_a_bound_and_is_answered_meanwhile(
    producer: ProducerProtocol, config: HandoffConfig
) -> None:
    producer.receive(PEER, CLAIM, now=0.0)
    now, num_answers = 0.0, 0
    while is_parked(actions := producer.advance(now := producer.next_deadline())):
        num_answers += 1
    assert now == config.rendezvous_wait_s
    assert num_answers >= config.rendezvous_wait_s / config.claim_timeout_s
    assert actions[0] == ClaimUnmet(NAME, denials(actions)[0].removeprefix("the offer "))
    assert "did the router send the prefill request to this node?" in denials(actions)[0]
    assert (producer.num_awaited, producer.next_deadline()) == (0, math.inf)


def test_a_request_that_comes_after_its_claim_was_denied_holds_no_blocks(producer: ProducerProtocol) -> None:
    producer.receive(PEER, CLAIM, now=0.0)
    while producer.num_awaited:
        producer.advance(producer.next_deadline())
    producer.announce("r", LEASE, NAME, now=40.0)
    (ended,) = made(producer, now=41.0)
    assert isinstance(ended, OfferEnded)
    assert ended.outcome == "aborted"


def test_a_claim_of_a_rendezvous_that_is_over_is_denied_at_once(producer: ProducerProtocol) -> None:
    producer.announce("r", LEASE, NAME, now=0.0)
    assert producer.withdraw(LEASE) == []
    assert "lost its blocks" in denials(producer.receive(PEER, CLAIM, now=0.1))[0]
    assert producer.num_awaited == 0


def test_a_consumer_that_leaves_before_the_request_comes_costs_no_blocks(producer: ProducerProtocol) -> None:
    producer.receive(PEER, CLAIM, now=0.0)
    producer.receive(PEER, Release(NAME, LEASE, delivered=False, **ONLY_RANK), now=0.1)
    producer.announce("r", LEASE, NAME, now=0.2)
    assert [type(action) for action in made(producer)] == [OfferEnded]


@pytest.mark.parametrize("is_announced", [False, True])
def test_a_name_has_one_consumer(producer: ProducerProtocol, is_announced: bool) -> None:
    producer.receive(PEER, CLAIM, now=0.0)
    if is_announced:
        producer.announce("r", LEASE, NAME, now=0.0)
    assert "another consumer" in denials(producer.receive(OTHER, CLAIM, now=0.1))[0]


def test_both_parts_of_a_name_must_fit(producer: ProducerProtocol) -> None:
    producer.receive(PEER, CLAIM, now=0.0)
    assert denials(producer.receive(OTHER, replace(CLAIM, request_id="6" * 32), now=0.1))


def test_a_claim_without_the_mark_of_a_rendezvous_gets_nothing(producer: ProducerProtocol) -> None:
    plain = replace(CLAIM, rendezvous=False)
    assert denials(producer.receive(PEER, plain, now=0.0))
    producer.announce("r", LEASE, NAME, now=0.0)
    assert denials(producer.receive(PEER, plain, now=0.0))


def test_the_number_of_claims_that_wait_is_bounded(identity: Identity, config: HandoffConfig) -> None:
    producer = ProducerProtocol(identity, replace(config, max_rendezvous=2), num_guards=1)
    producer.peer_connected(PEER, now=0.0)
    consumer = ConsumerProtocol(identity, config)
    hello = _hello(consumer)
    producer.receive(PEER, hello, now=0.0)
    actions = [
        producer.receive(PEER, Claim(f"{number}", number, **ONLY_RANK, rendezvous=True), now=0.0)
        for number in (1, 2, 3)
    ]
    assert [len(denials(answer)) for answer in actions] == [0, 0, 1]
    assert "max_rendezvous=2" in denials(actions[2])[0]


def test_a_router_may_give_up_a_rendezvous_whose_request_never_came(producer: ProducerProtocol) -> None:
    producer.receive(PEER, CLAIM, now=0.0)
    assert producer.give_up("another", LEASE) == []
    assert "given up by the router" in denials(producer.give_up(NAME, LEASE))[0]


def test_shutting_down_denies_claims_that_wait(producer: ProducerProtocol) -> None:
    producer.receive(PEER, CLAIM, now=0.0)
    assert "shuts down" in denials(producer.shutdown(now=1.0))[0]


# -- the consumer -----------------------------------------------------------------------------------


MEETING = RemoteOffer("there", 22, NAME, LEASE, ("sim://there",), 12, (), "c", is_rendezvous=True)
BLOCKS = (GroupBlocks(0, (1, 2, 3)),)


def _hello(consumer: ConsumerProtocol) -> object:
    (connect,) = consumer.claim("hello", replace(MEETING, lease=1), 0.0)
    assert isinstance(connect, Connect)
    consumer.connecting(connect.address, PEER, 0.0)
    (send,) = consumer.peer_connected(PEER, 0.0)
    return send.message


def claiming(consumer: ConsumerProtocol, welcome: Welcome) -> list[Action]:
    consumer.claim("ours", MEETING, 0.0)
    consumer.connecting("sim://there", PEER, 0.0)
    consumer.peer_connected(PEER, 0.0)
    return consumer.receive(PEER, welcome, 0.0)


def test_the_grant_says_what_the_guard_holds(consumer: ConsumerProtocol, welcome: Welcome) -> None:
    assert claiming(consumer, welcome) == [Send(PEER, CLAIM)]
    consumer.load("ours", BLOCKS, 0.0)
    grant = Grant(
        NAME,
        LEASE,
        guard_index=1,
        num_tokens=12,
        num_ready=12,
        block_ids=TABLES,
        content="c",
        guard_value=GUARD_VALUE,
    )
    (read,) = consumer.receive(PEER, grant, 1.0)
    assert isinstance(read, StartRead)
    assert (read.guard.index, read.guard.value) == (1, GUARD_VALUE)


def test_two_requests_that_do_not_meet_are_a_typed_error(
    consumer: ConsumerProtocol, welcome: Welcome
) -> None:
    claiming(consumer, welcome)
    consumer.load("ours", BLOCKS, 0.0)
    (ended,) = consumer.receive(PEER, Deny(NAME, LEASE, "the offer was not made"), 1.0)
    assert isinstance(ended, LoadEnded)
    assert isinstance(ended.error, RendezvousError)
