"""One node begins an answer and another one continues: together they give a single node's answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvferry.lab.engine.answers import Answer
from kvferry.lab.engine.default_model import default_model_folder
from kvferry.lab.engine.errors import InvalidRequestError
from kvferry.lab.engine.request import Request
from kvferry.lab.engine.sampling import TokenSampler, same_numbers_after_failure, sample
from kvferry.lab.engine.types import GenerationRequest, SamplingParams
from kvferry.lab.prove.models import byte_tokenizer

EOS = 0
MAX_MODEL_LEN = 1000
#: Both write a character in several tokens: one token per byte, and a real vocabulary.
TOKENIZERS: dict[str, PreTrainedTokenizerBase] = {
    "bytes": byte_tokenizer(),
    "SmolLM2": PreTrainedTokenizerFast(tokenizer_file=str(default_model_folder() / "tokenizer.json")),  # type: ignore[no-untyped-call]
}
#: Much of what makes trouble: characters of one to four bytes, joined emoji, marks that combine, and U+FFFD
#: itself.
TEXTS = st.text(
    alphabet=st.sampled_from("ab .\n\u00e9\u00df\u4e2d\U0001f6a2\U0001f1e9\u200d\u0301\ufffd\u05d0"),
    min_size=1,
    max_size=12,
)

Piece = tuple[int, str, str | None]


def pieces(tokenizer: PreTrainedTokenizerBase, source: GenerationRequest, tokens: list[int]) -> list[Piece]:
    """Return what a node sends to its client as it samples `tokens`."""
    request = Request("r", source, lambda _: [], 0.0)
    answer = Answer(request, tokenizer, frozenset({EOS}), MAX_MODEL_LEN)
    sent: list[Piece] = []
    for token in tokens:
        known = answer.take_known_piece()
        request.append_token(token)
        text, reason = answer.push_last_token()
        if known is not None:
            sent.append((known.new_token_ids[-1], known.text_delta, None))
        sent.append((token, text, reason))
        if reason is not None:
            break
    return sent


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=80, deadline=None)
@given(data=st.data(), prompt=TEXTS, answer=TEXTS, max_tokens=st.integers(1, 12))
def test_two_nodes_send_the_pieces_of_one(
    name: str, data: Any, prompt: str, answer: str, max_tokens: int
) -> None:
    tokenizer = TOKENIZERS[name]
    tokens = [*tokenizer.encode(answer, add_special_tokens=False), EOS]
    # A prompt of tokens may end inside a character.
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    prompt_ids = prompt_ids[: data.draw(st.integers(1, len(prompt_ids)))]
    start = data.draw(st.integers(0, len(answer) - 1))
    stop = data.draw(st.sampled_from([(), (answer[start : start + 3],), ("\ufffd",), ("zz", answer[-1])]))
    source = GenerationRequest("r", tuple(prompt_ids), SamplingParams(max_tokens, temperature=0.0, stop=stop))

    expected = pieces(tokenizer, source, tokens)
    num_known = data.draw(st.integers(1, len(expected)))
    if expected[num_known - 1][2] is not None:
        return
    rest = pieces(tokenizer, replace(source, known_token_ids=tuple(tokens[:num_known])), tokens[num_known:])
    assert rest[0][1] == "".join(text for _, text, _ in expected[:num_known])
    assert rest[1:] == expected[num_known:]


def test_a_token_that_ends_the_answer_cannot_be_continued() -> None:
    tokenizer = TOKENIZERS["bytes"]
    for sampling, known in (
        (SamplingParams(), (EOS,)),
        (SamplingParams(), (EOS, 65)),
        (SamplingParams(max_tokens=1), (65,)),
        (SamplingParams(max_tokens=2), (65, 66)),
        (SamplingParams(stop=("A",)), (*tokenizer.encode("A"), 66)),
    ):
        source = GenerationRequest("r", (65,), sampling, known_token_ids=known)
        with pytest.raises(InvalidRequestError, match="end the answer"):
            Answer(Request("r", source, lambda _: [], 0.0), tokenizer, frozenset({EOS}), MAX_MODEL_LEN)


def test_a_seeded_stream_of_random_numbers_continues_after_a_known_token() -> None:
    logits = torch.randn(12, 50, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(seed=3)
    alone, first, second = TokenSampler(params), TokenSampler(params), TokenSampler(params, num_to_skip=1)
    expected = [sample(row.unsqueeze(0), [alone]) for row in logits]
    assert sample(logits[:1], [first]) == expected[0]

    def fail_after_sampling() -> None:
        with same_numbers_after_failure([second]):
            sample(logits[1:2], [second])
            raise RuntimeError("the step fails and runs again")

    with pytest.raises(RuntimeError, match="runs again"):
        fail_after_sampling()
    assert [sample(row.unsqueeze(0), [second]) for row in logits[1:]] == expected[1:]
