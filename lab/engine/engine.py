"""`Engine`: the interface for servers, scripts and tests."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ...connector.errors import ConnectorError
from ...connector.stats import KVConnectorStats
from .answers import failed_answer
from .core import EngineCore
from .errors import EngineDeadError, InvalidRequestError, RequestFailedError, reason_of
from .settings import EngineSettings
from .types import EngineStats, GenerationRequest, RequestOutput

logger = logging.getLogger(__name__)

#: Seconds between two steps that can compute nothing because transfers are in flight. The pause doubles with
#: each such step. It stays shorter while a request of this node waits for a load than while other nodes load
#: this node's offers.
_FIRST_PAUSE_S = 0.0002
_LONGEST_PAUSE_LOADING_S = 0.001
_LONGEST_PAUSE_S = 0.005
#: Seconds between two checks, while idle, that the worker processes still run.
_CHECK_INTERVAL_S = 0.5
#: Turns an offer of this node into the order to end it; see `kvferry.connector.p2p.params`.
_RELEASE = {"do_remote_prefill": False, "do_remote_decode": False, "do_release": True}


@dataclass(eq=False)
class _Client:
    """The receiver of a request's outputs: a queue that belongs to an asyncio event loop.

    Attributes:
        offer: The `kv_transfer_params` of the last output; None before it. Only the engine's thread uses it.
    """

    loop: asyncio.AbstractEventLoop
    offer: Mapping[str, Any] | None = None
    outputs: asyncio.Queue[RequestOutput | Exception] = field(default_factory=asyncio.Queue)

    def put(self, item: RequestOutput | Exception) -> None:
        """Deliver an output, from any thread.

        If the loop is closed, drop it: nothing waits for it any more.
        """
        try:
            self.loop.call_soon_threadsafe(self.outputs.put_nowait, item)
        except RuntimeError:
            return
        except Exception:
            logger.exception("cannot deliver an output: it is lost to its client")


class Engine:
    """A model, its KV cache pool, its connector halves, and the thread that runs the steps.

    Lifecycle: construct (cheap) → `start` → any number of `generate` → `close`. Call `generate` on an asyncio
    loop; any loop will do. Every other method may be called from any thread.

    An engine that cannot continue ends every request, reports the reason in `stats`, and calls `on_death`. It
    cannot be started again; its process should exit.

    Args:
        on_death: Called once, in the engine's thread, after every request has ended; not called after
            `close`.

    Attributes:
        settings: The settings that were given.
        model_name: Name of the model for clients.
        on_handoffs: Called in the engine's thread with the connector's stats of a step in which handoffs
            ended. Set it before the first request.
    """

    def __init__(self, settings: EngineSettings, on_death: Callable[[], None] = lambda: None) -> None:
        self.settings = settings
        self._on_death = on_death
        self.on_handoffs: Callable[[KVConnectorStats], None] = lambda stats: None
        self.model_name = settings.served_model_name or Path(settings.model).name
        self._core: EngineCore | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._inbox: list[Callable[[EngineCore], None]] = []
        self._listening: set[_Client] = set()
        self._admitted: dict[str, _Client] = {}
        self._closing = False
        self._stats = EngineStats(healthy=False, error="the engine was not started")

    def start(self) -> None:
        """Load the model, allocate the pool, and start the connector and the step thread.

        This blocks for seconds, so do not call it on an event loop.

        Raises:
            ConfigurationError: a setting, the model folder or a connector option cannot work; nothing was
                started.
            KVTransferStateError: this process runs an engine with a connector already.
            EngineDeadError: the engine was started before.
        """
        if self._core is not None or self._closing:
            raise EngineDeadError("cannot start the engine again: an engine starts only once")
        self._core = EngineCore(self.settings, lambda stats: self.on_handoffs(stats))
        self._stats = self._core.stats()
        self._thread = threading.Thread(target=self._run, args=(self._core,), name="kvferry-engine")
        self._thread.start()

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self._started().parts.model.tokenizer

    @property
    def max_model_len(self) -> int:
        """The longest sequence, prompt and answer together, in tokens."""
        return self._started().max_model_len

    @property
    def model_digest(self) -> str:
        """Digest of what decides an answer: model, dtype, tokenizer, chat template and length limit.

        It is empty if the tokenizer is not known, because another engine's could be another one.
        """
        model = self._started().parts.config.model
        identity = model.identity
        parts = identity.weights, identity.configuration, identity.tokenizer, identity.chat_template
        made_of = "\0".join((model.dtype, str(model.max_model_len), *parts))
        return hashlib.sha256(made_of.encode()).hexdigest()[:16] if identity.tokenizer else ""

    @property
    def connector_description(self) -> Mapping[str, Any]:
        """What the connector says of this start of the node, such as where a decode node can reach it; empty
        without one.
        """
        return self._started().parts.connector_description

    @property
    def kv_events_port(self) -> int:
        """Where the engine publishes what its prefix cache stores and removes; 0 if it does not."""
        publisher = self._started().parts.publisher
        return publisher.port if publisher else 0

    def _started(self) -> EngineCore:
        if self._core is None:
            raise EngineDeadError("the engine was not started")
        return self._core

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[RequestOutput, None]:
        """Answer a request, piece by piece.

        Closing the generator, or cancelling its task, aborts the request.

        The first item means that the request was admitted; a refusal is raised instead. Any later failure
        ends this request with `finish_reason` `"error"` and does not affect others.

        Raises:
            InvalidRequestError: a field is wrong, or the id is in use; nothing was allocated.
            PromptTooLongError: the prompt is longer than the model or the pool allows; nothing was allocated.
            ConnectorError: `kv_transfer_params` are malformed; nothing was allocated.
            EngineDeadError: the engine is not running; also raised in the middle of an answer.
        """
        client = _Client(asyncio.get_running_loop())
        arrival_s = time.monotonic()
        self._listening.add(client)
        is_over = False
        try:
            self._submit(lambda core: self._admit(core, request, client, arrival_s))
            while not is_over:
                item = await client.outputs.get()
                is_over = isinstance(item, Exception) or item.finish_reason is not None
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._listening.discard(client)
            if not is_over:
                self._abandon(request.request_id, client)

    def abort(self, request_id: str) -> None:
        """End a request at the next step; its last output says `"abort"`. Unknown ids are ignored."""
        with contextlib.suppress(EngineDeadError):
            self._submit(lambda core: self._deliver(core.abort(request_id)))

    def move(self, name: str) -> None:
        """Stop the answer that may be moved by this name after its next token; its last output says
        `"moved"`.

        If there is none any more, nothing happens.
        """
        with contextlib.suppress(EngineDeadError):
            self._submit(lambda core: core.move(name))

    def decline(self, kv_transfer_params: Mapping[str, Any]) -> None:
        """Release another node's offer for a request that was refused. Malformed parameters are ignored."""
        with contextlib.suppress(EngineDeadError):
            self._submit(lambda core: _decline(core, kv_transfer_params))

    def stats(self) -> EngineStats:
        """Return the engine's figures after its latest step.

        This also works before `start` and after `close`.
        """
        return self._stats

    def close(self) -> None:
        """Abort all requests, shut the connector down, end the thread and free the pool. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
        self._core = None

    # -- from other threads to the engine's ----------------------------------------------------------

    def _submit(self, order: Callable[[EngineCore], None]) -> None:
        with self._changed:
            if self._thread is None or self._closing or not self._stats.healthy:
                raise EngineDeadError(self._stats.error or "the engine is not running")
            self._inbox.append(order)
            self._changed.notify()

    def _abandon(self, request_id: str, client: _Client) -> None:
        """Abort a request whose client has left, unless another request has its id by now.

        If it has ended already, the client has not received its last output, so no node will load what that
        offers.
        """

        def order(core: EngineCore) -> None:
            if self._admitted.get(request_id) is client:
                self._deliver(core.abort(request_id))
            elif client.offer is not None and client.offer.get("do_remote_prefill"):
                _decline(core, {**client.offer, **_RELEASE})

        with contextlib.suppress(EngineDeadError):
            self._submit(order)

    # -- the engine's thread -------------------------------------------------------------------------

    def _run(self, core: EngineCore) -> None:
        try:
            self._loop(core)
            error = EngineDeadError("the engine was closed")
        except EngineDeadError as cause:
            logger.error("the engine ends, and all its requests fail: %s", cause)
            error = cause
        except Exception as cause:
            logger.exception("the step loop failed; the engine ends, and all its requests fail")
            error = EngineDeadError(f"the step loop failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        with self._changed:
            self._stats = replace(self._stats, healthy=False, error=str(error))
            self._inbox.clear()
        # Report the end before the connector shuts down, which can take seconds. Clients then learn the
        # reason at once, and the process may start to exit as soon as `on_death` is called.
        for client in list(self._listening):
            client.put(error)
        try:
            if not self._closing:
                self._on_death()
        finally:
            self._shut_down(core)

    def _loop(self, core: EngineCore) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            orders, is_last = self._take_orders(pause_s if core.has_work else _CHECK_INTERVAL_S)
            for order in orders:
                order(core)
            if is_last:
                # The orders above were carried out before this, because a new request among them may name
                # another node's offer, which only its abort releases.
                self._deliver(core.abort_all())
                core.settle()
                return
            if not core.has_work:
                core.check()
            num_tokens, outputs = core.step() if core.has_work else (0, [])
            self._stats = core.stats()
            core.publish_events()
            self._deliver(outputs)
            if num_tokens:
                pause_s = 0.0
            else:
                longest = _LONGEST_PAUSE_LOADING_S if core.is_loading else _LONGEST_PAUSE_S
                pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), longest)

    def _take_orders(self, timeout_s: float) -> tuple[list[Callable[[EngineCore], None]], bool]:
        """Wait up to `timeout_s` for orders of other threads, and take them.

        The second value is True if no more will come.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._closing, timeout_s)
            orders, self._inbox = self._inbox, []
            return orders, self._closing

    def _admit(self, core: EngineCore, request: GenerationRequest, client: _Client, arrival_s: float) -> None:
        try:
            core.add(request, arrival_s)
        except (InvalidRequestError, ConnectorError) as refusal:
            client.put(refusal)
        except Exception as error:
            logger.exception("cannot admit request %s; it fails", request.request_id)
            if request.kv_transfer_params is not None:
                _decline(core, request.kv_transfer_params)
            why = str(error) if isinstance(error, RequestFailedError) else reason_of(error)
            client.put(failed_answer(request, why))
        else:
            self._admitted[request.request_id] = client

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            client = self._admitted[output.request_id]
            if output.finish_reason is not None:
                del self._admitted[output.request_id]
                client.offer = output.kv_transfer_params
            client.put(output)

    def _shut_down(self, core: EngineCore) -> None:
        try:
            core.close()
        except Exception:
            logger.exception("the connector did not shut down cleanly")


def _decline(core: EngineCore, kv_transfer_params: Mapping[str, Any]) -> None:
    try:
        core.decline(kv_transfer_params)
    except ConnectorError:
        return  # malformed params name no offer
    except Exception:
        logger.exception(
            "cannot decline another node's offer: that node keeps its blocks until the lease ends"
        )
