"""The frames of `nixl` survive the wire, and damaged ones are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.transports.errors import ProtocolError, VersionMismatchError
from kvferry.transports.nixl.wire import FRAME_LIMITS, Hello, Preface, Reading, Ready, decode
from kvferry.transports.streams import FrameReader, encode_frame


def hello(metadata: bytes = b"metadata") -> Hello:
    return Hello(4, 4096, "host", 0, np.array([1, 2], dtype=np.uint64) << np.uint64(20), (4096, 1), metadata)


@pytest.mark.parametrize("frame", [Ready(), Reading(), Preface()], ids=repr)
def test_frames_survive_the_wire(frame: Ready) -> None:
    ((kind, body),) = FrameReader(FRAME_LIMITS).feed(frame.encode())
    assert decode(kind, body) == frame


def test_a_hello_survives_the_wire() -> None:
    said = hello()
    ((kind, body),) = FrameReader(FRAME_LIMITS).feed(said.encode())
    heard = decode(kind, body)
    assert isinstance(heard, Hello)
    assert heard.addresses.tolist() == said.addresses.tolist()
    for name in ("num_guards", "guard_table", "kind", "device", "num_bytes", "metadata"):
        assert getattr(heard, name) == getattr(said, name)


@given(st.integers(0, 255), st.binary(max_size=200))
def test_garbage_is_a_typed_error(kind: int, body: bytes) -> None:
    try:
        for found, content in FrameReader(FRAME_LIMITS).feed(encode_frame(kind, body)):
            decode(found, content)
    except (ProtocolError, VersionMismatchError):
        pass
