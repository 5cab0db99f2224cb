"""The detokenizer returns all text once, in whole characters, and nothing past a stop text."""

from __future__ import annotations

import random

from kvferry.lab.engine.detokenizer import IncrementalDetokenizer, StopMatcher


class ByteDecoder:
    """One token per byte. Token 256 is special."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(token for token in token_ids if token < 256).decode("utf-8", errors="replace")


def test_the_pieces_together_are_the_text_and_each_piece_is_whole_characters() -> None:
    text = "naïve café 🚢 über"
    detokenizer = IncrementalDetokenizer(ByteDecoder(), list(b"prompt"))
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert detokenizer.flush() == ""


def test_a_character_that_stays_incomplete_comes_out_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(ByteDecoder(), [])
    assert [detokenizer.push(byte) for byte in "é".encode()[:1]] == [""]
    assert detokenizer.flush() == "\ufffd"


def test_random_pieces_give_what_a_search_of_the_whole_text_gives() -> None:
    random_numbers = random.Random(7)
    for _ in range(300):
        text = "".join(random_numbers.choices("ab", k=20))
        stops = ["".join(random_numbers.choices("ab", k=random_numbers.randint(2, 5))) for _ in range(2)]
        matcher = StopMatcher(stops)
        out = "".join(matcher.push(character) for character in text) + matcher.flush()
        # The stop text that ends first wins. When it is found, the text after it has not been generated yet.
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        seen = text[: min(ends)] if ends else text
        cuts = [seen.find(stop) for stop in stops if stop in seen]
        assert out == (seen[: min(cuts)] if cuts else text)
