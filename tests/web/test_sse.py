"""Server-sent events are split in whatever pieces they arrive, and pass byte for byte."""

from __future__ import annotations

import random

import pytest

from kvferry.router.http.sse import Event, EventTooLongError, Splitter, events_of

STREAMS = [
    b"data: a\n\ndata: b\n\n\n\ndata: [DONE]\n\ndata: c",
    b"data: a\r\n\r\n: comment\r\n\r\ndata: [DONE]\r\n\r\n",
    b"\n\r\n\n\ndata: x\n",
    b"",
]


@pytest.mark.parametrize("stream", STREAMS)
def test_events_are_the_same_in_whatever_pieces_they_arrive(stream: bytes) -> None:
    whole = [event.raw for event in events_of(stream)]
    assert b"".join(whole) == stream
    for size in range(1, len(stream)):
        splitter = Splitter(100)
        pieces = (stream[at : at + size] for at in range(0, len(stream), size))
        arrived = [event.raw for piece in pieces for event in splitter.add(piece)]
        assert all(raw.endswith((b"\n\n", b"\n\r\n")) for raw in arrived)
        assert arrived + [event.raw for event in splitter.rest()] == whole


def test_random_streams_in_random_pieces_lose_no_byte() -> None:
    for seed in range(2000):
        drawn = random.Random(seed)
        parts = [b"a", b"\n", b"\r\n", b"data: {}", b"\n\n", b"\r\n\r\n", b"\r"]
        stream = b"".join(drawn.choices(parts, k=drawn.randrange(12)))
        splitter, arrived, at = Splitter(1000), [], 0
        while at < len(stream):
            size = drawn.randrange(1, 4)
            arrived += splitter.add(stream[at : at + size])
            at += size
        arrived += splitter.rest()
        assert [event.raw for event in arrived] == [event.raw for event in events_of(stream)], seed


def test_an_event_has_a_longest_length() -> None:
    splitter = Splitter(1000)
    assert splitter.add(b"a" * 1000) == []
    with pytest.raises(EventTooLongError, match="sent an event of more than 1000 bytes"):
        splitter.add(b"a")
    assert splitter.rest() == []


@pytest.mark.parametrize(
    ("raw", "content", "is_done"),
    [
        (b'data: {"a": 1}\n\n', {"a": 1}, False),
        (b'data:{"a": 1}\r\n\r\n', {"a": 1}, False),
        (b"data: [DONE]\n\n", {}, True),
        (b": ping\n\n", {}, False),
        (b'data: {"a": \n\n', {}, False),
    ],
)
def test_an_events_content_is_its_json_object(raw: bytes, content: dict[str, int], is_done: bool) -> None:
    event = Event(raw)
    assert (event.content, event.is_done, event.raw) == (content, is_done, raw)
