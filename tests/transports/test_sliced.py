"""Reads in slices keep their promises in every order of events and with every loss: `transports.sliced`
without a network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.transports.errors import ProtocolError
from kvferry.transports.sliced import Reader, Server, Slice, SliceState, Verdict
from tests.support.explore import Counterexample
from tests.support.sliced_model import Nodes, Wire, explore_wire

DESIGN = Path(__file__).parents[2] / "docs" / "design.md"

#: As `tcp`, `ucx` and `zeromq` move slices; each with pools in main memory and with staging buffers on either
#: side.
KERNEL = Wire("kernel", is_together=True, can_divert=True)
LIBRARY = Wire("library", is_together=False, can_divert=False)
MESSAGES = Wire("messages", is_together=True, can_divert=True, is_apart=True, is_late=True)
WIRES = [
    wire.with_buffers(staged, gathered)
    for wire in (KERNEL, LIBRARY, MESSAGES)
    for staged, gathered in ((False, False), (True, False), (False, True))
]
WIRES += [replace(wire, staged=True, num_buffers=2) for wire in (KERNEL, LIBRARY, MESSAGES)]

every_wire = pytest.mark.parametrize("wire", WIRES, ids=str)


@every_wire
def test_no_order_of_two_slices_with_a_loss_breaks_a_promise(wire: Wire) -> None:
    assert explore_wire(wire, (2,), 1) > 50
    assert explore_wire(wire, (0,), 1) > 5


@pytest.mark.slow
@every_wire
def test_no_order_of_two_slices_with_two_losses_breaks_a_promise(wire: Wire) -> None:
    assert explore_wire(wire, (2,), 2) > 100


@pytest.mark.slow
@every_wire
def test_no_order_of_two_reads_with_a_loss_breaks_a_promise(wire: Wire) -> None:
    """The window has room for two of their three slices, and each ring for one."""
    assert explore_wire(wire, (2, 1), 1) > 200


def test_the_table_of_the_design_has_the_transitions_that_happen() -> None:
    Nodes.transitions.clear()
    for wire in (
        KERNEL,
        LIBRARY.with_buffers(staged=True, gathered=False),
        MESSAGES.with_buffers(staged=True, gathered=False),
    ):
        explore_wire(wire, (2,), 1)
    happened = {(before.value if before else "–", after.value) for before, after in Nodes.transitions}
    _, _, section = DESIGN.read_text().partition("### Reads in slices\n")
    rows = [
        line.split("|")[1:4] for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")
    ]
    in_design = {
        (state.strip(), target.strip())
        for states, _, targets in rows
        for state in states.split(",")
        for target in targets.split(",")
        if target.strip() in {found.value for found in SliceState}
    }
    assert happened == in_design


def test_a_peer_that_receives_nothing_may_have_128_slices_waiting() -> None:
    nodes = Nodes(KERNEL, (1,), 0)
    nodes.server.num_unsent = 127
    (fetch,) = nodes.fetches.values()
    nodes.server.answer(fetch)
    with pytest.raises(ProtocolError, match="128 slices wait for it"):
        nodes.server.answer(fetch)
    assert nodes.server.num_unsent == 128


def test_a_pause_of_the_owner_is_no_silence_of_its_peer() -> None:
    nodes = Nodes(KERNEL.with_buffers(staged=False, gathered=True), (1,), 0)
    (fetch,) = nodes.fetches.values()
    nodes.server.answer(fetch)
    nodes.end_gather(None)
    nodes.owners_mover.gather_ring.when_free("another peer", lambda: None)
    nodes.server.require_progress(100.0, 0.0, 5.0)
    nodes.server.require_progress(160.0, 57.0, 5.0)
    with pytest.raises(ProtocolError, match="received nothing for 5 s"):
        nodes.server.require_progress(164.0, 1.0, 5.0)


# -- planted bugs: the exploration finds each of them ---------------------------------------------------


def the_guard_is_not_looked_at_after_the_last_byte(patch: pytest.MonkeyPatch) -> None:
    def left(server: Server[Any, Any], answer: Any) -> bool:
        server.forget(answer)
        return bool(answer.is_held)

    patch.setattr(Server, "left", left)


def the_guard_is_not_looked_at_after_a_gather(patch: pytest.MonkeyPatch) -> None:
    def on_gathered(server: Server[Any, Any], answer: Any, ticket: Any) -> None:
        if server._is_closed or ticket.error is not None:
            real(server, answer, ticket)
        else:
            server._sending.add(answer)
            server.send(answer)

    real = Server._on_gathered
    patch.setattr(Server, "_on_gathered", on_gathered)


def the_verdict_is_ignored(patch: pytest.MonkeyPatch) -> None:
    real = Reader.answered
    patch.setattr(Reader, "answered", lambda reader, piece, verdict: real(reader, piece, Verdict.HELD))


def a_late_verdict_counts_as_one_that_held(patch: pytest.MonkeyPatch) -> None:
    def answered(reader: Reader[Any], piece: Slice, verdict: Verdict) -> None:
        real(reader, piece, Verdict.HELD if verdict is Verdict.LATER else verdict)

    real = Reader.answered
    patch.setattr(Reader, "answered", answered)


def the_owner_is_asked_again_before_the_last_byte(patch: pytest.MonkeyPatch) -> None:
    def answered(reader: Reader[Any], piece: Slice, verdict: Verdict) -> None:
        transfer = piece.transfer
        if verdict is Verdict.LATER and transfer.num_slices == len(transfer.plan) and not transfer.is_stopped:
            reader._ask_again(transfer)
        real(reader, piece, Verdict.HELD if verdict is Verdict.LATER else verdict)

    real = Reader.answered
    patch.setattr(Reader, "answered", answered)


def a_verdict_ends_a_read_before_its_bytes(patch: pytest.MonkeyPatch) -> None:
    def answered(reader: Reader[Any], piece: Slice, verdict: Verdict) -> None:
        real(reader, piece, verdict)
        if piece.state is SliceState.FETCHED:
            piece.is_answered = False
            reader._done(piece.transfer)

    real = Reader.answered
    patch.setattr(Reader, "answered", answered)


def corrupt_bytes_are_accepted(patch: pytest.MonkeyPatch) -> None:
    real = Reader.arrived
    patch.setattr(Reader, "arrived", lambda reader, piece, error=None: real(reader, piece))


def bytes_that_a_reuse_has_changed_count_as_corrupt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reader, "_on_corrupt", lambda reader, transfer, error: reader._fail(transfer, error))


def a_slice_is_placed_after_its_read_was_stopped(patch: pytest.MonkeyPatch) -> None:
    def arrived(reader: Reader[Any], piece: Slice, error: Any = None) -> None:
        was_stopped, piece.transfer.is_stopped = piece.transfer.is_stopped, False
        real(reader, piece, error)
        piece.transfer.is_stopped |= was_stopped

    real = Reader.arrived
    patch.setattr(Reader, "arrived", arrived)


def a_read_ends_while_its_bytes_still_arrive(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reader, "_is_written_to", lambda reader, transfer: transfer.num_scattering > 0)


def a_read_ends_while_a_copy_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reader, "_is_written_to", lambda reader, transfer: False)


def a_read_ends_twice(patch: pytest.MonkeyPatch) -> None:
    def end_if_over(reader: Reader[Any], transfer: Any) -> None:
        if transfer.is_stopped and not transfer.is_doubtful and not reader._is_written_to(transfer):
            reader._transfers.pop(transfer.read.transfer_id, None)
            reader._end_read(transfer.read, transfer.error)

    patch.setattr(Reader, "_end_if_over", end_if_over)


def a_slice_that_is_dropped_keeps_its_buffer(patch: pytest.MonkeyPatch) -> None:
    def drop(reader: Reader[Any], piece: Slice) -> None:
        piece.state = SliceState.DROPPED
        reader._end_if_over(piece.transfer)

    patch.setattr(Reader, "_drop", drop)


def a_buffer_is_given_back_while_it_is_written_to(patch: pytest.MonkeyPatch) -> None:
    def abandon(reader: Reader[Any], transfer: Any) -> None:
        real(reader, transfer)
        for piece in reader._slices.values():
            if piece.transfer is transfer and piece.state is SliceState.FETCHED:
                reader._give_back(piece)

    real = Reader._abandon
    patch.setattr(Reader, "_abandon", abandon)


def a_stopped_read_frees_its_window_at_once(patch: pytest.MonkeyPatch) -> None:
    def abandon(reader: Reader[Any], transfer: Any) -> None:
        real(reader, transfer)
        for tag, piece in list(reader._slices.items()):
            if piece.transfer is transfer:
                del reader._slices[tag]

    real = Reader._abandon
    patch.setattr(Reader, "_abandon", abandon)


def a_closed_connection_keeps_its_buffers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reader, "close", lambda reader: reader._slices.clear())


def an_owner_keeps_the_buffers_of_a_peer_that_is_gone(patch: pytest.MonkeyPatch) -> None:
    def close(server: Server[Any, Any]) -> None:
        server._is_closed = True
        server._waiting.clear()

    def forget(server: Server[Any, Any], answer: Any) -> None:
        if not server.nodes.is_closed:  # type: ignore[attr-defined]
            real(server, answer)

    real = Server.forget
    patch.setattr(Server, "close", close)
    patch.setattr(Server, "forget", forget)


@pytest.mark.parametrize(
    ("plant", "wire", "staged", "gathered"),
    [
        (the_guard_is_not_looked_at_after_the_last_byte, KERNEL, False, False),
        (the_guard_is_not_looked_at_after_the_last_byte, LIBRARY, False, False),
        (the_guard_is_not_looked_at_after_a_gather, KERNEL, False, True),
        (the_verdict_is_ignored, KERNEL, False, False),
        (the_verdict_is_ignored, LIBRARY, False, False),
        (a_late_verdict_counts_as_one_that_held, MESSAGES, False, False),
        (the_owner_is_asked_again_before_the_last_byte, MESSAGES, False, False),
        (a_verdict_ends_a_read_before_its_bytes, LIBRARY, False, False),
        (corrupt_bytes_are_accepted, KERNEL, False, False),
        (corrupt_bytes_are_accepted, MESSAGES, False, False),
        (bytes_that_a_reuse_has_changed_count_as_corrupt, MESSAGES, False, False),
        (a_slice_is_placed_after_its_read_was_stopped, MESSAGES, False, False),
        (a_read_ends_while_its_bytes_still_arrive, LIBRARY, False, False),
        (a_read_ends_while_a_copy_writes, KERNEL, True, False),
        (a_read_ends_twice, KERNEL, False, False),
        (a_slice_that_is_dropped_keeps_its_buffer, LIBRARY, True, False),
        (a_buffer_is_given_back_while_it_is_written_to, LIBRARY, True, False),
        (a_stopped_read_frees_its_window_at_once, KERNEL, False, False),
        (a_closed_connection_keeps_its_buffers, KERNEL, True, False),
        (an_owner_keeps_the_buffers_of_a_peer_that_is_gone, KERNEL, False, True),
    ],
    ids=lambda value: value.__name__ if callable(value) else str(value),
)
def test_a_planted_bug_is_found(
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    wire: Wire,
    staged: bool,
    gathered: bool,
) -> None:
    plant(monkeypatch)
    with pytest.raises(Counterexample):
        explore_wire(wire.with_buffers(staged, gathered), (2,), 1)
