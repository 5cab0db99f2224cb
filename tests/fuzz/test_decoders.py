"""No bytes of a stranger make a decoder do anything but read or refuse them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .decoders import CORPUS, DECODERS, try_decoder

each_decoder = pytest.mark.parametrize("name", DECODERS)


@each_decoder
def test_what_was_found_once_is_read_or_refused(name: str) -> None:
    files = sorted((CORPUS / name).iterdir())
    assert files
    for file in files:
        try_decoder(name, file.read_bytes())


@each_decoder
def test_the_corpus_has_something_that_is_read(name: str) -> None:
    """Otherwise fuzzing would begin with what the first check refuses."""
    decoder = DECODERS[name]

    def is_read(data: bytes) -> bool:
        try:
            decoder.read(data)
        except decoder.errors:
            return False
        return True

    assert any(is_read(file.read_bytes()) for file in (CORPUS / name).iterdir())


@each_decoder
@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(name: str, data: bytes) -> None:
    try_decoder(name, data)
