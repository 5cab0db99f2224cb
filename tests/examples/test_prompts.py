"""Prompts of any size: a long one delays no other request."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvferry.lab.engine.errors import PromptTooLongError
from kvferry.lab.node.openai_request import ChatPrompt, Message, parse_completion
from kvferry.lab.node.prompts import MAX_WAITING, NUM_THREADS, SHORT_CHARS, PromptReader
from kvferry.router.http.errors import ApiError
from tests.support.patience import DEADLINE_S, until

LONGEST = 100


def byte_level() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


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


SLOW = "slow" + "!" * SHORT_CHARS


@pytest.mark.parametrize("where", ["in the loop", "in a thread"])
async def test_a_text_that_is_not_unicode_is_refused(where: str) -> None:
    text = "\ud800" * (1 if where == "in the loop" else SHORT_CHARS + 1)
    async with reader_of(byte_level()) as reader:
        with pytest.raises(ApiError, match="not valid Unicode") as caught:
            await reader.read(text)
        assert (caught.value.status, caught.value.param) == (400, "prompt")


async def test_several_prompts_of_which_one_is_too_long_are_refused() -> None:
    async with reader_of(byte_level()) as reader:
        reader.refuse_too_long([(1,) * LONGEST] * 2)
        with pytest.raises(PromptTooLongError, match=f"at most {LONGEST} are possible") as caught:
            reader.refuse_too_long([(1,) * LONGEST, (1,) * (LONGEST + 1)])
        assert caught.value.num_prompt_tokens == LONGEST + 1


async def test_a_chat_is_read_after_its_template_is_applied() -> None:
    """A template may drop most of the messages that it is given."""
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'][-50:] }}{% endfor %}"

    async with reader_of(tokenizer) as reader:
        chat = ChatPrompt((Message("user", "a" * 100_000),))
        assert len(await reader.read(chat)) == 50


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
