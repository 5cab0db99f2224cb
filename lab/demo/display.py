"""Show answers on the screen: as they stream, each when it is complete, or only how many there are."""

from __future__ import annotations

import sys
from typing import Protocol

from ...transports.checked import printable
from ..client import Answer
from ..engine.progress import Elapsed
from .report import shortened

MAX_PROMPT_CHARS = 100


class Display(Protocol):
    """Show what becomes of each prompt."""

    def begin(self, prompt: str) -> None:
        """Note that the prompt is about to be sent."""

    def text(self, delta: str) -> None:
        """Note a piece of the answer."""

    def end(self, prompt: str, answer: Answer) -> None:
        """Note that the answer is complete or failed."""

    def close(self) -> None:
        """Remove what is still shown of a wait. Idempotent."""


class Streaming:
    """Show each answer as it comes, for one prompt at a time."""

    def __init__(self) -> None:
        self._prefill: Elapsed | None = None

    def begin(self, prompt: str) -> None:
        print(f"\n> {shortened(prompt, MAX_PROMPT_CHARS)}\n", flush=True)
        self._prefill = Elapsed("computing the prompt")
        self._prefill.start()

    def text(self, delta: str) -> None:
        if delta:
            self.close()
        print(_shown(delta), end="", flush=True)

    def end(self, prompt: str, answer: Answer) -> None:
        self.close()
        print(flush=True)
        if answer.error:
            say(_failure(answer))

    def close(self) -> None:
        if self._prefill is not None:
            self._prefill.stop()
            self._prefill = None


class Whole:
    """Show each answer when it is complete, and the time until then. This is for several prompts at once.

    Args:
        what: What goes on, for the line that shows the time.
        num_prompts: How many answers to expect.
        is_silent: Show how many answers there are, but not the answers.
    """

    def __init__(self, what: str, num_prompts: int, *, is_silent: bool = False) -> None:
        self._what = what
        self._num_prompts = num_prompts
        self._num_answered = 0
        self._is_silent = is_silent
        self._elapsed = Elapsed(self._progress())
        self._elapsed.start()

    def begin(self, prompt: str) -> None:
        return

    def text(self, delta: str) -> None:
        return

    def end(self, prompt: str, answer: Answer) -> None:
        self._num_answered += 1
        self._elapsed.update(self._progress())
        if self._is_silent:
            return
        self._elapsed.say(f"\n> {shortened(prompt, MAX_PROMPT_CHARS)}\n\n{_shown(answer.text)}", sys.stdout)
        if answer.error:
            self._elapsed.say(_failure(answer))

    def close(self) -> None:
        self._elapsed.stop()

    def _progress(self) -> str:
        return f"{self._what}, {self._num_answered} of {self._num_prompts} answered"


def say(line: str) -> None:
    """Print a line about the demo itself. It goes to standard error, so that the answers stay apart."""
    print(_shown(line), file=sys.stderr, flush=True)


def _shown(text: str) -> str:
    return printable(text, keep="\n\t")


def _failure(answer: Answer) -> str:
    return f"the request failed: {printable(answer.error)}"
