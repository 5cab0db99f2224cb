"""From what a client wrote to the token ids that the model reads."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from ..engine.errors import PromptTooLongError
from ..web.errors import bad_request, unavailable
from ..web.serving import SHUTDOWN_DEADLINE_S, leave_now
from .openai_request import ChatPrompt
from .prompt_sizes import size_bound_of

#: Prompts of up to this many characters are tokenized where they come: that takes a millisecond or two, and a thread's turn longer.
SHORT_CHARS = 4096
#: What a message of a chat counts beside its text, for the template's work.
MESSAGE_CHARS = 64
#: Long prompts that are tokenized at a time, and those that may wait for that.
NUM_THREADS = 2
MAX_WAITING = 16

Prompt = str | tuple[int, ...] | ChatPrompt

logger = logging.getLogger(__name__)


class PromptReader:
    """Tokenizes prompts, so that a long one holds up neither the event loop nor the short ones.

    `read` belongs to one event loop; close it there.

    Args:
        max_prompt_tokens: The longest prompt that the engine takes.

    Attributes:
        num_waiting: Long prompts that wait for a thread.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_prompt_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._bound = size_bound_of(tokenizer)
        # The first call sets the tokenizer up, which must not happen in two threads at once.
        tokenizer.encode("", verbose=False)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tokenize")
        self._free = asyncio.Semaphore(NUM_THREADS)
        self.num_waiting = 0
        self._running: set[Future[tuple[int, ...]]] = set()

    def refuse_by_size(self, prompt: object) -> None:
        """Refuse the `prompt` of a body that cannot fit, before anything looks at what is in it or copies it.

        Raises:
            PromptTooLongError: it cannot fit into the longest prompt.
        """
        if isinstance(prompt, list) and len(prompt) == 1:
            prompt = prompt[0]  # a batch of one
        if isinstance(prompt, list) and prompt and type(prompt[0]) is int:
            if len(prompt) > self._max_prompt_tokens:
                raise self._too_long(f"{len(prompt)}", len(prompt))
        elif isinstance(prompt, str):
            with contextlib.suppress(UnicodeEncodeError):  # reported when the text is read
                self._check_size(prompt)

    async def read(self, prompt: Prompt) -> tuple[int, ...]:
        """Encode a prompt; a chat goes through the model's own template.

        Raises:
            ApiError: a token id that the model does not have, a text that is not Unicode, a chat that the model's
                template refuses, or an empty prompt (400); too many long prompts wait already (503).
            PromptTooLongError: the text cannot fit into the longest prompt.
        """
        if isinstance(prompt, tuple) or _num_chars(prompt) <= SHORT_CHARS:
            return self._token_ids(prompt)
        return await self._in_a_thread(functools.partial(self._token_ids, prompt))

    async def close(self) -> None:
        """Wait for what is tokenized just now; nothing new begins. After `SHUTDOWN_DEADLINE_S` the process ends."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if running := [asyncio.wrap_future(job) for job in self._running]:
            _, late = await asyncio.wait(running, timeout=SHUTDOWN_DEADLINE_S)
            if late:
                logger.warning(
                    "ended while %d prompts were tokenized: a thread cannot be interrupted", len(late)
                )
                leave_now(0)

    async def _in_a_thread(self, job: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        if self.num_waiting >= MAX_WAITING:
            raise unavailable(f"{MAX_WAITING} long prompts wait to be tokenized already: try again")
        # Waiting here and not in the pool, a client that leaves takes its prompt along.
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
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(ended, future)

        # When the job ends, not when its client leaves: a thread cannot be interrupted.
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
            self._check_size(text)
        except UnicodeEncodeError as error:
            raise bad_request(f"the text is not valid Unicode: {error}", param) from None
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def _check_size(self, text: str) -> None:
        least = self._bound.least_tokens(text)
        if least > self._max_prompt_tokens:
            raise self._too_long(f"at least {least}", least)

    def _too_long(self, words: str, num_tokens: int) -> PromptTooLongError:
        return PromptTooLongError(
            f"the prompt has {words} tokens; with room for an answer of one token, "
            f"at most {self._max_prompt_tokens} are possible here",
            num_prompt_tokens=num_tokens,
            max_prompt_tokens=self._max_prompt_tokens,
        )

    def _chat_text(self, chat: ChatPrompt) -> str:
        if not self._tokenizer.chat_template:
            raise bad_request("this model has no chat template: use /v1/completions", "messages")
        messages: list[dict[str, Any]] = [{"role": m.role, "content": m.content} for m in chat.messages]
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
    return sum(len(message.role) + len(message.content) + MESSAGE_CHARS for message in prompt.messages)
