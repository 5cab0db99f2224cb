"""`Engine`: what a server, a script or a test talks to."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from transformers import PreTrainedTokenizerBase

from .settings import EngineSettings
from .types import EngineStats, GenerationRequest, RequestOutput

__all__ = ["Engine"]


class Engine:
    """A model, its KV cache pool, its connector halves, and the thread that runs the steps.

    Life: construct (cheap) → `start` → any number of `generate` → `close`. `generate` belongs to an asyncio
    loop, any loop; every other method may be called from any thread.
    """

    def __init__(self, settings: EngineSettings) -> None: ...

    #: Settings as given.
    settings: EngineSettings
    #: What clients call the model.
    model_name: str

    def start(self) -> None:
        """Load the model, allocate the pool, start connector and step thread. Blocks; call it off the event loop.

        Raises:
            ConfigurationError: a setting, the model folder or a connector option cannot work; nothing is left over.
            ValueError: the memory does not hold one request of maximum length; the message says what would.
        """

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        raise NotImplementedError

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and answer together, in tokens."""
        raise NotImplementedError

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        """Answer a request, piece by piece. Closing the generator, or cancelling its task, aborts the request.

        The first item tells that the request was admitted; a refusal is raised instead of it.

        Raises:
            InvalidRequestError: a field is wrong, the id is in use; nothing was allocated.
            PromptTooLongError: prompt longer than the model or the pool admits; nothing was allocated.
            ConnectorError: `kv_transfer_params` are malformed; nothing was allocated.
            EngineDeadError: the engine is not running; also raised in the middle of an answer.
        """
        raise NotImplementedError
        yield

    def abort(self, request_id: str) -> None:
        """End a request at the next step; its last output says `"abort"`. Unknown ids are ignored."""

    def stats(self) -> EngineStats:
        """The engine's figures now. Works before `start` and after `close`, too."""
        raise NotImplementedError

    def close(self) -> None:
        """Abort what runs, shut the connector down, end the thread, free the pool. Idempotent."""
