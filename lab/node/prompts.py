"""Turn a client's prompt into token ids."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from ...router.http.errors import bad_request, unavailable
from ...router.http.serving import SHUTDOWN_DEADLINE_S, leave_now
from ..engine.errors import PromptTooLongError
from .openai_request import ChatPrompt, Prompt

#: Prompts of up to this many characters are tokenized on the event loop. This takes a millisecond or two; a
#: thread would take longer to get to it.
SHORT_CHARS = 4096
#: Characters that each message of a chat counts in addition to its text, because the template does work for
#: it.
MESSAGE_CHARS = 64
#: A text with more characters per token of the longest prompt is refused before it takes minutes to tokenize.
#: Tokens of known vocabularies have up to 128, and an ordinary text has four.
MOST_CHARS_PER_TOKEN = 256
#: Most long prompts that are tokenized at a time, and most that wait for a thread.
NUM_THREADS = 2
MAX_WAITING = 16

logger = logging.getLogger(__name__)


class PromptReader:
    """Tokenizes prompts.

    A long prompt is tokenized in a thread, so that it delays neither the event loop nor short ones.

    Call `read` and `close` on one event loop only.

    Args:
        max_prompt_tokens: The longest prompt that the engine accepts, in tokens.

    Attributes:
        num_waiting: The number of long prompts that wait for a thread.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        # The first call initializes the tokenizer, which must not happen in two threads at once.
        tokenizer.encode("", verbose=False)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tokenize")
        self._free = asyncio.Semaphore(NUM_THREADS)
        self.num_waiting = 0
        self._running: set[Future[tuple[int, ...]]] = set()

    async def read(self, prompt: Prompt) -> tuple[int, ...]:
        """Encode a prompt. A chat is first turned into a text by the model's template.

        Raises:
            ApiError: the prompt has a token id outside the vocabulary, is not valid Unicode, is refused by
                the model's chat template, is much too long, or is empty (400); or too many long prompts are
                waiting (503).
        """
        if isinstance(prompt, tuple) or (num_chars := _num_chars(prompt)) <= SHORT_CHARS:
            return self._token_ids(prompt)
        if num_chars > (most := self._max_prompt_tokens * MOST_CHARS_PER_TOKEN):
            message = f"the prompt has {num_chars} characters: at most {most} are read, for prompts of at most {self._max_prompt_tokens} tokens"
            raise bad_request(
                message, "prompt" if isinstance(prompt, str) else "messages", "context_length_exceeded"
            )
        return await self._in_a_thread(functools.partial(self._token_ids, prompt))

    def refuse_too_long(self, prompts: Sequence[tuple[int, ...]]) -> None:
        """Refuse prompts of which one is too long, as the engine refuses a single one.

        Raises:
            PromptTooLongError: one of them is longer than the longest prompt.
        """
        for prompt in prompts:
            if len(prompt) > self._max_prompt_tokens:
                raise PromptTooLongError(
                    f"the prompt has {len(prompt)} tokens: at most {self._max_prompt_tokens} are possible, "
                    "with room for an answer of one token",
                    num_prompt_tokens=len(prompt),
                    max_prompt_tokens=self._max_prompt_tokens,
                )

    async def close(self) -> None:
        """Wait for the prompts that are being tokenized, and start no others.

        If this takes longer than `SHUTDOWN_DEADLINE_S`, end the process, because a thread cannot be
        interrupted.
        """
        self._threads.shutdown(wait=False, cancel_futures=True)
        if running := [asyncio.wrap_future(job) for job in self._running]:
            _, late = await asyncio.wait(running, timeout=SHUTDOWN_DEADLINE_S)
            if late:
                logger.warning(
                    "ending the process while %d prompts are being tokenized: a thread cannot be interrupted",
                    len(late),
                )
                leave_now(0)

    async def _in_a_thread(self, job: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        if self.num_waiting >= MAX_WAITING:
            raise unavailable(f"{MAX_WAITING} long prompts are waiting to be tokenized: retry later")
        # Wait here, not in the thread pool's queue, so that a prompt is dropped when its client leaves.
        self.num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.num_waiting -= 1
        loop = asyncio.get_running_loop()
        running = self._threads.submit(job)
        self._running.add(running)

        def ended(_: Future[tuple[int, ...]]) -> None:
            self._running.discard(running)
            self._free.release()

        def notify(future: Future[tuple[int, ...]]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits for a thread
                loop.call_soon_threadsafe(ended, future)

        # A thread is free when its job ends, not when the client leaves: a thread cannot be interrupted.
        running.add_done_callback(notify)
        return await asyncio.wrap_future(running)

    def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, tuple):
            return self._known_tokens(prompt)
        if isinstance(prompt, ChatPrompt):
            token_ids = self._encode(self._chat_text(prompt), "messages", add_special_tokens=False)
        else:
            token_ids = self._encode(prompt, "prompt", add_special_tokens=True)
        if not token_ids:
            raise bad_request("the prompt is empty: it needs at least one token", "prompt")
        return token_ids

    def _known_tokens(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        size = len(self._tokenizer)
        for token_id in (min(token_ids), max(token_ids)):
            if not 0 <= token_id < size:
                raise bad_request(f"token id {token_id} is not in the vocabulary of {size} tokens", "prompt")
        return token_ids

    def _encode(self, text: str, param: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise bad_request(f"the text is not valid Unicode: {error}", param) from None
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def _chat_text(self, chat: ChatPrompt) -> str:
        if not self._tokenizer.chat_template:
            raise bad_request("the model has no chat template: use /v1/completions", "messages")
        messages: list[dict[str, Any]] = [
            {"role": each.role, "content": each.content, **each.more} for each in chat.messages
        ]
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            )
        except TemplateError as error:
            raise bad_request(
                f"the model's chat template refuses the messages: {error}", "messages"
            ) from None


def _num_chars(prompt: str | ChatPrompt) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    # How long `more` is as a text depends on the template.
    texts = (f"{message.role}{message.content}{message.more or ''}" for message in prompt.messages)
    return sum(len(text) + MESSAGE_CHARS for text in texts)
