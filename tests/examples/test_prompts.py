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

from kvferry.lab.node.openai_request import ChatPrompt, Message
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


async def test_the_template_reads_the_calls_of_a_history_with_tools() -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.tool_calls | tojson if m.tool_calls else m.content }};{% endfor %}"
    chat = ChatPrompt((Message("assistant", "", {"tool_calls": [{"id": "c"}]}), Message("tool", "2")))
    async with reader_of(tokenizer) as reader:
        text = tokenizer.decode(await reader.read(chat))
    assert text == 'assistant [{"id": "c"}];tool 2;'


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
