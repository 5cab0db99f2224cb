"""Show answers on the screen as they stream."""

from __future__ import annotations

import sys

from ...transports.checked import printable
from ..client import Answer
from ..engine.progress import Elapsed
from .report import shortened

MAX_PROMPT_CHARS = 100


class Streaming:
    """Show each answer as it comes, one prompt at a time."""

    def __init__(self) -> None:
        self._prefill: Elapsed | None = None

    def begin(self, prompt: str) -> None:
        """Note that the prompt is about to be sent."""
        print(f"\n> {shortened(prompt, MAX_PROMPT_CHARS)}\n", flush=True)
        self._prefill = Elapsed("computing the prompt")
        self._prefill.start()

    def text(self, delta: str) -> None:
        """Show a piece of the answer."""
        if delta:
            self.close()
        print(_shown(delta), end="", flush=True)

    def end(self, answer: Answer) -> None:
        """Note that the answer is complete or failed."""
        self.close()
        print(flush=True)
        if answer.error:
            say(f"the request failed: {answer.error}")

    def close(self) -> None:
        """Remove what is still shown of a wait. Idempotent."""
        if self._prefill is not None:
            self._prefill.stop()
            self._prefill = None


def say(line: str) -> None:
    """Print a line about the demo itself. It goes to standard error, so that the answers stay apart."""
    print(_shown(line), file=sys.stderr, flush=True)


def _shown(text: str) -> str:
    return printable(text, keep="\n\t")
