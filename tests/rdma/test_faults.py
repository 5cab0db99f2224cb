"""Owners that die or freeze, and a wire that fails, over RDMA verbs: every read ends, with the right bytes or
an error.

No byte lands after the end of a read was reported. The report shows how many did (`late_bytes`).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from kvferry.transports import PeerLost, TransferEnded

from .conftest import Wire
from .nodes import BLANK, DEADLINE_S, POOL_BYTES, OwnerProcess, Reader

pytestmark = pytest.mark.timeout(300)

Record = Callable[[str, object], None]

#: How long late bytes are waited for. Soft-RoCE repeats a packet after a second or less.
LATE_S = 4.0


@pytest.fixture(scope="module", params=["ucx", "nixl"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lost_packets_are_repeated_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX waits for a second by default."""
    monkeypatch.setenv("UCX_RC_TIMEOUT", "100ms")


@pytest.fixture
def owner(scheme: str) -> Iterator[OwnerProcess]:
    owner = OwnerProcess(scheme)
    yield owner
    owner.close()


@pytest.fixture
def reader(scheme: str) -> Iterator[Reader]:
    with Reader(scheme) as reader:
        yield reader


def start_and_wait_until_part_has_landed(reader: Reader, wire: Wire, peer_id: int, timeout_s: float) -> int:
    reader.assert_reads(peer_id)
    wire.limit()
    transfer_id = reader.start_read(peer_id, POOL_BYTES, timeout_s)
    reader.until(reader.has_begun)
    return transfer_id


def count_late_bytes(reader: Reader, wire: Wire, record: Record, ended: TransferEnded) -> None:
    """Blank the memory that the failed read no longer uses, let the network recover, and count what lands."""
    assert ended.error is not None
    reader.memory[:] = BLANK
    wire.mend()
    reader.serve_for(LATE_S)
    record("outcome", f"{type(ended.error).__name__} after {ended.seconds:.1f} s")
    record("late_bytes", reader.num_landed())
    assert reader.num_landed() == 0


def test_an_owner_that_is_killed_ends_the_read(
    owner: OwnerProcess, reader: Reader, wire: Wire, record_property: Record
) -> None:
    peer_id = reader.connect(owner)
    transfer_id = start_and_wait_until_part_has_landed(reader, wire, peer_id, DEADLINE_S)
    owner.signal(signal.SIGKILL)
    count_late_bytes(reader, wire, record_property, reader.end_of(transfer_id))
    assert isinstance(reader.events[-1], PeerLost)


def test_an_owner_that_freezes_costs_a_read_or_nothing(
    scheme: str, owner: OwnerProcess, reader: Reader, wire: Wire, record_property: Record
) -> None:
    """`nixl` reads a frozen owner, because the path is one-sided.

    With `ucx` the owner takes part in each slice.
    """
    peer_id = reader.connect(owner)
    reader.assert_reads(peer_id)
    owner.signal(signal.SIGSTOP)
    ended = reader.end_of(reader.start_read(peer_id, 4 << 20))
    if scheme == "nixl":
        assert ended.error is None
        reader.assert_right(4 << 20)
        record_property("outcome", f"right bytes after {ended.seconds:.1f} s")
        owner.signal(signal.SIGCONT)
    else:
        reader.memory[:] = BLANK
        owner.signal(signal.SIGCONT)
        count_late_bytes(reader, wire, record_property, ended)
    assert owner.is_alive
    reader.assert_reads(reader.connect(owner))


def test_a_wire_that_is_cut_ends_the_read_and_a_new_connection_works_when_it_is_mended(
    owner: OwnerProcess, reader: Reader, wire: Wire, record_property: Record
) -> None:
    peer_id = reader.connect(owner)
    transfer_id = start_and_wait_until_part_has_landed(reader, wire, peer_id, 2.0)
    wire.cut()
    count_late_bytes(reader, wire, record_property, reader.end_of(transfer_id))
    assert owner.is_alive
    reader.assert_reads(reader.connect(owner))


@pytest.mark.parametrize(
    "fault",
    ["loss 1%", "delay 20ms", "corrupt 1%"],
    ids=["one_packet_in_100_lost", "20_ms_delay", "one_packet_in_100_corrupted"],
)
@pytest.mark.usefixtures("lost_packets_are_repeated_soon")
def test_a_bad_wire_delivers_every_byte(
    owner: OwnerProcess, reader: Reader, wire: Wire, record_property: Record, fault: str
) -> None:
    peer_id = reader.connect(owner)
    wire.set(*fault.split())
    ended = reader.assert_reads(peer_id)
    num_lost = wire.num_dropped()
    record_property("outcome", f"right bytes after {ended.seconds:.1f} s; {num_lost} packets lost")
    assert (num_lost > 0) == fault.startswith("loss")
