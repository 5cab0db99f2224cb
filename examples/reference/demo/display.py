"""How answers appear on the screen: as they stream, when they are whole, or not at all."""

from __future__ import annotations

import sys
from typing import Protocol

from .client import Answer
from .report import shortened

MAX_PROMPT_CHARS = 100


class Display(Protocol):
    """Hears of every prompt and its answer."""

    def begin(self, prompt: str) -> None:
        """The prompt is about to be sent."""

    def text(self, delta: str) -> None:
        """A piece of the answer came."""

    def end(self, prompt: str, answer: Answer) -> None:
        """The answer is whole, or failed."""


class Streaming:
    """Text as it comes: for one prompt at a time."""

    def begin(self, prompt: str) -> None:
        print(f"\n> {shortened(prompt, MAX_PROMPT_CHARS)}\n", flush=True)

    def text(self, delta: str) -> None:
        print(delta, end="", flush=True)

    def end(self, prompt: str, answer: Answer) -> None:
        print(flush=True)
        _say_failure(answer)


class Whole:
    """Each answer when it is whole: for several prompts at once."""

    def begin(self, prompt: str) -> None:
        return

    def text(self, delta: str) -> None:
        return

    def end(self, prompt: str, answer: Answer) -> None:
        print(f"\n> {shortened(prompt, MAX_PROMPT_CHARS)}\n\n{answer.text}", flush=True)
        _say_failure(answer)


class Silent:
    """Nothing."""

    def begin(self, prompt: str) -> None:
        return

    def text(self, delta: str) -> None:
        return

    def end(self, prompt: str, answer: Answer) -> None:
        return


def say(line: str) -> None:
    """Tell the user what goes on, apart from the answers."""
    print(line, file=sys.stderr, flush=True)


def _say_failure(answer: Answer) -> None:
    if answer.error:
        say(f"the request failed: {answer.error}")
