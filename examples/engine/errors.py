"""What the engine raises, beside the errors of kvferry.

    EngineError
    ├─ InvalidRequestError(ValueError)   the request cannot be served; nothing was allocated for it
    │  └─ PromptTooLongError             names the lengths
    └─ EngineDeadError(RuntimeError)     the engine is closed, its step loop died, or a worker process did

A setting that cannot work is a `ConfigurationError`; malformed `kv_transfer_params` are a `ConnectorError`.
"""

from __future__ import annotations

__all__ = ["EngineDeadError", "EngineError", "InvalidRequestError", "PromptTooLongError"]


class EngineError(Exception):
    """Root of the engine's own errors."""


class InvalidRequestError(EngineError, ValueError):
    """The request was refused; nothing was allocated for it, and the engine goes on serving.

    Attributes:
        param: The field of the request at fault, as the client writes it.
    """

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLongError(InvalidRequestError):
    """Prompt and answer do not fit into what one sequence may hold.

    Attributes:
        num_prompt_tokens: Length of the prompt.
        max_prompt_tokens: The longest prompt that would have been accepted.
    """

    def __init__(self, message: str, *, num_prompt_tokens: int, max_prompt_tokens: int) -> None:
        super().__init__(message, param="prompt")
        self.num_prompt_tokens = num_prompt_tokens
        self.max_prompt_tokens = max_prompt_tokens


class EngineDeadError(EngineError, RuntimeError):
    """The engine no longer runs: it was closed, its step loop died of the error given as cause, or a worker is gone."""
