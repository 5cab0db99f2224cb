"""The decoder of the `zeromq` transport decodes what was encoded, and raises a typed error for
anything else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.transports import Guard
from kvferry.transports.errors import ChecksumError, ProtocolError, VersionMismatchError
from kvferry.transports.sums import sum_of
from kvferry.transports.zeromq.frames import Frame
from kvferry.transports.zeromq.wire import Fetch, Hello, Message, Slice, Stale, decode

HELD = Guard(5, 77)
HELLO = Hello(64, (4 << 20,))
ROWS = np.array([(0, 4 << 20)], dtype=np.int64)


def frames(*parts: bytes) -> list[Frame]:
    return [Frame.copy_of(part) for part in parts]


@pytest.mark.parametrize(
    "message",
    [
        HELLO,
        Fetch(2**64 - 1, 2**32 - 1, HELD, True, ROWS),
        Fetch(1, 0, HELD, False, ROWS[:0]),
        Slice(1, 2, True, 2**64 - 1, (Frame.copy_of(b"abc"),)),
        Slice(1, 2, False, 0, (Frame.copy_of(b"abc"), Frame.copy_of(b""))),
        Stale(7, 8),
    ],
)
def test_what_was_encoded_is_decoded(message: Any) -> None:
    match message:
        case Slice():
            body = message.frames
        case Stale():
            body = frames(b"")
        case _:
            body = frames(message.body())
    decoded = decode([*frames(message.head()), *body])
    assert type(decoded) is type(message)
    for name, value in vars(message).items():
        assert np.array_equal(getattr(decoded, name), value)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.binary(max_size=64), max_size=4),
    st.sampled_from([b"", b"\x01", b"\x03", b"\x04", b"\x05"]),
)
def test_garbage_is_refused_and_nothing_else(parts: list[bytes], kind: bytes) -> None:
    head, body = kind + b"".join(parts[:1]), parts[1:]
    for garbage in (head, head + sum_of(head), head + sum_of(head + b"".join(body))):
        try:
            decode(frames(garbage, *body))
        except (ProtocolError, ChecksumError, VersionMismatchError):
            pass


@pytest.mark.parametrize(
    "message",
    [HELLO, Fetch(1, 0, HELD, True, ROWS), Message(b"a message"), Stale(7, 8), Slice(1, 2, True, 3, ())],
)
def test_a_flipped_bit_anywhere_is_refused(message: Any) -> None:
    body = message.body if isinstance(message, Message) else getattr(message, "body", bytes)()
    whole = bytearray(message.head() + body)
    for at in range(8 * len(whole)):
        whole[at // 8] ^= 1 << at % 8
        with pytest.raises((ProtocolError, ChecksumError, VersionMismatchError)):
            decode(frames(bytes(whole[: -len(body) or None]), body and bytes(whole[-len(body) :])))
        whole[at // 8] ^= 1 << at % 8


@pytest.mark.parametrize(
    "rows",
    [[(0, 0)], [(0, -1)], [(0, 2**62)], [(0, 8 << 20), (0, 1)], [(0, 2**63 - 1)] * 2, [(0, 1)] * 4097],
)
def test_a_fetch_is_bounded(rows: list[tuple[int, int]]) -> None:
    fetch = Fetch(1, 0, HELD, True, np.array(rows, dtype=np.int64))
    with pytest.raises(ProtocolError):
        decode(frames(fetch.head(), fetch.body()))


@pytest.mark.parametrize(
    "hello",
    [
        *(Hello(1, sizes) for sizes in [(), (0,), (-1, 5), (2**62,), (1,) * 65537]),
        *(Hello(1, (4096,), max_slice_bytes) for max_slice_bytes in (0, 1000, (8 << 20) + 1)),
    ],
)
def test_a_hello_is_bounded(hello: Hello) -> None:
    with pytest.raises(ProtocolError):
        decode(frames(hello.head(), hello.body()))
