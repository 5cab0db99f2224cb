"""Prompts of any size: one that cannot fit is refused unread, and a long one delays no other request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvferry.reference.engine.errors import PromptTooLongError
from kvferry.reference.engine.settings import DEFAULT_MODEL
from kvferry.reference.engine.weights import model_folder
from kvferry.reference.node.openai_request import ChatPrompt, Message, parse_completion
from kvferry.reference.node.prompt_sizes import size_bound_of
from kvferry.reference.node.prompts import MAX_WAITING, NUM_THREADS, SHORT_CHARS, PromptReader
from kvferry.web.errors import ApiError
from tests.support.patience import DEADLINE_S

LONGEST = 100
#: Pieces of text that tokenizers treat very differently: many bytes become one token, one character many, or none.
PIECES = ["a", " ", "        ", "\n", "\u00a0", "\u3000", "the ferry", "é", "e\u0301", "\u1112\u1161\u11ab", "\u212a", "\u1fef", "𝐊",
          "İ", "字", "🙂", "👩\u200d👧", "<end>", " <end> ", "\x00", "\x04", "\u0390", "ﷺ", "▁", "\ufffd", "0123"]  # fmt: skip


def byte_level(*merged: str, without: str = "", **components: Any) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token for each byte except those of `without`, and a token for each of `merged`."""
    missing = {letter for letter, _ in pre_tokenizers.ByteLevel(False, False).pre_tokenize_str(without)}
    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set("".join(missing)))
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    merges: list[tuple[str, str]] = []

    def add(token: str) -> None:
        if token not in vocabulary:
            halves = token[: len(token) // 2], token[len(token) // 2 :]
            for half in halves:
                add(half)
            merges.append(halves)
            vocabulary[token] = len(vocabulary)

    for token in merged:
        add(token)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return wrapped(tokenizer, **components)


def byte_fallback(**components: Any) -> PreTrainedTokenizerFast:
    """Make a tokenizer like Llama 2's: spaces become ▁, and unknown characters become their bytes."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁aefhrty", "▁▁", "▁▁▁▁", "th", "the"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("t", "h"), ("th", "e")]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return wrapped(tokenizer, **components)


def wrapped(tokenizer: Tokenizer, **components: Any) -> PreTrainedTokenizerFast:
    added = components.pop("added", None)
    for name, component in components.items():
        setattr(tokenizer, name, component)
    if added is not None:
        tokenizer.add_tokens([added])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def end(**settings: bool) -> AddedToken:
    return AddedToken("<end>", normalized=False, **settings)


BOUNDED = {
    "byte level": byte_level("Ġ" * 8, "Ġthe", added=end()),
    "byte level, NFC": byte_level("ä¸Ń", normalizer=normalizers.NFC()),
    "byte level, NFKC and lower case": byte_level(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "byte level by a normalizer": byte_level(
        "Ġ" * 8, pre_tokenizer=None, normalizer=normalizers.ByteLevel(), added=AddedToken("é 字", normalized=True)
    ),
    "byte level, some unknown": byte_level("Ġth", without="\x04\x00e", added=end(lstrip=True)),
    "byte fallback": byte_fallback(),
    "byte fallback, swallowing": byte_fallback(added=end(lstrip=True, rstrip=True)),
    "split": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"\s+"), "isolated"), pre_tokenizers.ByteLevel(use_regex=False)]
        )
    ),
}  # fmt: skip
UNBOUNDED = {
    "words": wrapped(Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))),
    "drops separators": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(use_regex=False)]
        )
    ),
    "whitespace": byte_fallback(pre_tokenizer=pre_tokenizers.Whitespace()),
    "strips": byte_level(normalizer=normalizers.Strip()),
    "strips accents": byte_level(normalizer=normalizers.StripAccents()),
    "joins spaces": byte_level(normalizer=normalizers.Replace(Regex(" +"), " ")),
    "drops a text": byte_level(normalizer=normalizers.Replace("a", "")),
    "fuses what is unknown": wrapped(
        Tokenizer(models.BPE(vocab={"<unk>": 0, "a": 1}, merges=[], unk_token="<unk>", fuse_unk=True))
    ),
}


@pytest.mark.parametrize("name", BOUNDED)
@given(text=st.lists(st.sampled_from(PIECES) | st.characters(exclude_categories=["Cs"])).map("".join))
@settings(max_examples=150, deadline=None)
def test_no_text_has_fewer_tokens_than_the_bound_for_its_size(name: str, text: str) -> None:
    tokenizer = BOUNDED[name]
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
    assert 0 <= size_bound_of(tokenizer).least_tokens(text) <= num_tokens or text == ""


@pytest.mark.parametrize("name", BOUNDED)
def test_where_a_token_has_a_longest_text_a_longer_text_has_more_tokens(name: str) -> None:
    assert size_bound_of(BOUNDED[name]).least_tokens("b" * 10000) >= 100


def test_the_default_models_tokenizer_has_a_bound() -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder(DEFAULT_MODEL))
    bound = size_bound_of(tokenizer)
    assert bound.least_tokens("a" * 81_000) == 1000
    # The tokenizer has no token for this byte.
    assert bound.least_tokens("\x04" * 1000) == len(tokenizer.encode("\x04" * 1000)) == 0


@pytest.mark.parametrize("name", UNBOUNDED)
def test_there_is_no_bound_where_a_tokenizer_may_drop_text(name: str) -> None:
    assert size_bound_of(UNBOUNDED[name]).least_tokens("a " * 10000) == 0


# -- the reader ------------------------------------------------------------------------------------------


class SlowTokenizer(PreTrainedTokenizerFast):
    """Tokenizes a text that begins with "slow" only when the test allows it."""

    def encode(self, text: str, **settings: Any) -> list[int]:
        if text.startswith("slow"):
            self.started.release()
            assert self.let_go.wait(DEADLINE_S)
        return super().encode(text, **settings)


def slow_tokenizer() -> SlowTokenizer:
    slow = SlowTokenizer(tokenizer_object=byte_level().backend_tokenizer)
    slow.started, slow.let_go = threading.Semaphore(0), threading.Event()
    return slow


@asynccontextmanager
async def reader_of(
    tokenizer: PreTrainedTokenizerFast, longest: int = LONGEST
) -> AsyncIterator[PromptReader]:
    reader = PromptReader(tokenizer, longest)
    try:
        yield reader
    finally:
        if isinstance(tokenizer, SlowTokenizer):
            tokenizer.let_go.set()
        await reader.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


SLOW = "slow" + "!" * SHORT_CHARS


@pytest.mark.parametrize("prompt", ["a" * (LONGEST * 8 + 1), [1] * (LONGEST + 1), [[1] * (LONGEST + 1)]])
async def test_a_prompt_that_cannot_fit_is_refused_by_its_size(prompt: Any) -> None:
    async with reader_of(byte_level("Ġ" * 8)) as reader:
        with pytest.raises(PromptTooLongError, match=f"at most {LONGEST} are possible") as caught:
            reader.refuse_by_size(prompt)
        assert caught.value.max_prompt_tokens == LONGEST < caught.value.num_prompt_tokens
        assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "prompt", [" " * (LONGEST * 8), [1] * LONGEST, [[1] * LONGEST], ["a"], [], None, {}, "\ud800"]
)
async def test_a_prompt_that_may_fit_or_is_malformed_is_not_refused_by_its_size(prompt: Any) -> None:
    async with reader_of(byte_level("Ġ" * 8)) as reader:
        reader.refuse_by_size(prompt)


async def test_the_longest_text_that_fits_is_read() -> None:
    async with reader_of(
        byte_level("Ġ" * 8, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    ) as reader:
        assert len(await reader.read(" " * (LONGEST * 8))) == LONGEST


async def test_a_chat_is_measured_after_its_template_is_applied() -> None:
    """A template may drop most of the messages that it is given."""
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'][-50:] }}{% endfor %}"

    async with reader_of(tokenizer) as reader:
        chat = ChatPrompt((Message("user", "a" * 100_000),))
        assert len(await reader.read(chat)) == 50
        with pytest.raises(PromptTooLongError, match="at least 150 tokens"):
            await reader.read(ChatPrompt(chat.messages * 3))


async def test_a_long_prompt_delays_neither_the_loop_nor_short_prompts() -> None:
    tokenizer = slow_tokenizer()

    async with reader_of(tokenizer, 10_000) as reader:
        long = [asyncio.create_task(reader.read(SLOW)) for _ in range(NUM_THREADS)]
        for _ in long:
            await asyncio.to_thread(tokenizer.started.acquire)
        assert len(await reader.read("short")) == 5
        assert not any(task.done() for task in long)
        tokenizer.let_go.set()
        assert [len(ids) for ids in await asyncio.gather(*long)] == [len(SLOW)] * NUM_THREADS


async def test_a_limited_number_of_long_prompts_waits_and_one_more_must_retry_later() -> None:
    tokenizer = slow_tokenizer()

    async with reader_of(tokenizer, 10_000) as reader:
        tasks = [asyncio.create_task(reader.read(SLOW)) for _ in range(NUM_THREADS + MAX_WAITING)]
        await until(lambda: reader.num_waiting == MAX_WAITING)
        with pytest.raises(ApiError, match="long prompts are waiting") as caught:
            await reader.read(SLOW)
        assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
        for task in tasks[:-1]:  # some are running, some are waiting
            task.cancel()
        # A thread goes on until its text is done, even if its request was cancelled.
        await until(lambda: reader.num_waiting == 1)
        tokenizer.let_go.set()
        assert len(await tasks[-1]) == len(SLOW)
        assert len(await reader.read(SLOW)) == len(SLOW)


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]]], ids=str)
def test_a_request_may_have_several_prompts(prompt: Any) -> None:
    expected = tuple(one if isinstance(one, str) else tuple(one) for one in prompt)
    assert parse_completion({"prompt": prompt}).prompts == expected


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], [[], []], [["a"], ["b"]], [[[]]], [["a"]], [[["a"]]], [[[1]]], [1, "a"], ["a", 1], [[1], "a"], ["a", [1]], [True], [1.5], [None], [{}], {}, None, 7, True],
    ids=str,
)  # fmt: skip
def test_a_value_that_is_not_a_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ApiError, match="'prompt' must be a string or a list") as caught:
        parse_completion({"prompt": prompt})
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize(
    ("prompt", "read"), [(["a"], "a"), ([[1, 2]], (1, 2)), ([1], (1,)), ("a", "a")], ids=str
)
def test_one_prompt_may_be_written_as_a_batch_of_one(prompt: Any, read: object) -> None:
    assert parse_completion({"prompt": prompt}).prompts == (read,)
