"""The errors that the engine raises in addition to those of kvferry.

    EngineError
    ├─ InvalidRequestError(ValueError)   the request cannot be served; nothing was allocated for it
    │  └─ PromptTooLongError             names the lengths
    ├─ RequestFailedError                one request cannot go on; the engine goes on
    ├─ StepFailedError                   a step computed nothing, but the model still runs
    └─ EngineDeadError(RuntimeError)     the engine was closed, or its step loop or a worker process ended

A setting that cannot work is a `ConfigurationError`; malformed `kv_transfer_params` are a `ConnectorError`.
"""

from __future__ import annotations

from ...connector.output import KVConnectorOutput


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
    """The prompt and the answer are longer than one sequence may be.

    Attributes:
        num_prompt_tokens: Length of the prompt.
        max_prompt_tokens: The longest prompt that would have been accepted.
    """

    def __init__(self, message: str, *, num_prompt_tokens: int, max_prompt_tokens: int) -> None:
        super().__init__(message, param="prompt")
        self.num_prompt_tokens = num_prompt_tokens
        self.max_prompt_tokens = max_prompt_tokens


class RequestFailedError(EngineError):
    """One request cannot go on. It holds nothing any more, and the engine goes on serving the others."""


class StepFailedError(EngineError):
    """The computation of a step raised. No token of it counts, and the model still runs.

    Attributes:
        report: What the connector's worker half reported in this step. It is reported once, so it must not be
            lost.
    """

    def __init__(self, message: str, report: KVConnectorOutput | None) -> None:
        super().__init__(message)
        self.report = report


class EngineDeadError(EngineError, RuntimeError):
    """The engine no longer runs: it was closed, its step loop ended with the error given as cause, or a
    worker ended.
    """


def reason_of(error: Exception) -> str:
    """Describe an unexpected error in one line, for a client."""
    return f"{type(error).__name__}: {error}"
