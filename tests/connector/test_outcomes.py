"""`Outcomes.wait`, with which an idle step ends as soon as a handoff does."""

from __future__ import annotations

import threading
import time

import pytest

from kvferry.connector.handoff.events import GroupBlocks, LoadEnded, OfferEnded
from kvferry.connector.p2p.orders import HandoffMetadata, OfferOrder, RequestOrders
from kvferry.connector.p2p.outcomes import Outcomes

BLOCKS = (GroupBlocks(0, (1, 2)),)
FOREVER_S = 600.0
ORDERS = HandoffMetadata(
    (RequestOrders("p", offer=OfferOrder(1, ((1,),), 16, "content")), RequestOrders("d", load=BLOCKS))
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def outcomes() -> Outcomes:
    return Outcomes("shm", "uniform")


def test_without_a_handoff_there_is_no_wait(outcomes: Outcomes) -> None:
    outcomes.wait(FOREVER_S)


def test_what_has_ended_before_ends_the_wait(outcomes: Outcomes) -> None:
    outcomes.expect(ORDERS, 0.0)
    outcomes.load_ended(LoadEnded("d", "loaded", None, BLOCKS), 1.0)
    outcomes.wait(FOREVER_S)
    assert outcomes.take_report().finished_recving == {"d"}


@pytest.mark.parametrize("is_first", [True, False])
def test_one_rank_reports_what_the_scheduler_half_has_counted(is_first: bool) -> None:
    outcomes = Outcomes("shm", "uniform", is_first=is_first)
    outcomes.expect(HandoffMetadata(counts={"offered_requests_total/taken": 3}), 0.0)
    assert (outcomes.take_stats() is not None) == is_first


@pytest.mark.parametrize("ended", ["load", "offer"])
def test_an_end_ends_the_wait(outcomes: Outcomes, ended: str) -> None:
    outcomes.expect(ORDERS, 0.0)
    waiter = threading.Thread(target=outcomes.wait, args=[FOREVER_S])
    waiter.start()
    if ended == "load":
        outcomes.load_ended(LoadEnded("d", "loaded", None, BLOCKS), 1.0)
    else:
        outcomes.offer_ended(OfferEnded("p", "delivered", ""))
    waiter.join()
    report = outcomes.take_report()
    assert (report.finished_recving, report.finished_sending) == (
        ({"d"}, set()) if ended == "load" else (set(), {"p"})
    )


def test_the_wait_has_an_end_of_its_own(outcomes: Outcomes) -> None:
    outcomes.expect(ORDERS, 0.0)
    began = time.monotonic()
    outcomes.wait(0.05)
    assert time.monotonic() - began >= 0.05
    assert not outcomes.take_report().finished_recving
