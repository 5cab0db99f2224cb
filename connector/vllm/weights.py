"""Notices that the weights of a running vLLM engine change, and makes the node's identity follow them.

A node describes its weights to peers by the files that it loaded. But vLLM can change weights in memory: by a
reload, by a transfer from a trainer, or by any function that a user sends to the workers. All of them go
through `EngineCore.collective_rpc`, and vLLM shows a connector none of them. So that method is wrapped: after
each call the workers compare what their models hold with what they held before.

What was computed with the old weights stays in vLLM's prefix cache until the user resets it, as vLLM asks
for. So `EngineCore.reset_prefix_cache` is wrapped as well: between a change and the reset the node hands
nothing over.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import secrets
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from typing import TYPE_CHECKING, Any

from ...transports.errors import ConfigurationError
from .identity import weights_of_files

if TYPE_CHECKING:
    import torch

    from .scheduler import SchedulerSide

logger = logging.getLogger(__name__)

#: What a worker answers if its weights cannot be compared with those of another node.
UNKNOWN = ""
#: How long the workers may take to hash their weights.
_TIMEOUT_S = 600.0
_MAX_THREADS = 8
#: On a GPU, weights are summed in portions of this many 64-bit words.
_PORTION_WORDS = 1 << 20
_SHOWN_DIGITS = 16


# -- in a worker ---------------------------------------------------------------------------------------


class LoadedWeights:
    """Hashes a model's weights in memory.

    Some kernels, for example those of linear layers on a CPU, keep weights in a form that nothing outside can
    read, and leave an empty parameter behind. vLLM replaces such a kernel when it loads its layer again. So
    as long as no kernel was replaced since the first hash, its weights are those of that time.
    """

    def __init__(self) -> None:
        self._packed: dict[str, weakref.ref[Any]] | None = None

    def stamp(self, model: torch.nn.Module, *, is_loaded_anew: bool = False) -> str:
        """Hash what the model's parameters and buffers hold, and the numbers by which its layers compute.

        Args:
            is_loaded_anew: All kernels of now have the weights of files.

        Returns:
            A digest that two models share if they were loaded alike and hold the same bytes. `UNKNOWN` if a
            kernel with weights of its own was replaced since the first call, or if weights are not there at
            present.
        """
        packed = dict(_packed(model))
        if self._packed is None or is_loaded_anew:
            self._packed = {name: weakref.ref(kernel) for name, kernel in packed.items()}
        if packed != {name: kernel() for name, kernel in self._packed.items()}:
            return UNKNOWN
        tensors = [(name, tensor) for name, tensor in _tensors(model) if tensor.untyped_storage().nbytes()]
        if any(tensor.is_meta for _, tensor in tensors):
            return UNKNOWN  # while vLLM loads a layer, its parameters have no memory
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), "kvferry-hash") as pool:
            digests = pool.map(digest_of, [tensor for _, tensor in tensors])
            lines = [
                f"{name} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.storage_offset()} {digest}"
                for (name, tensor), digest in zip(tensors, digests, strict=True)
            ]
        lines += [f"{name} {number!r}" for name, number in _numbers(model)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _packed(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the functions of modules whose parameters are empty, by name: those that have the weights."""
    import torch

    for prefix, module in model.named_modules():
        if any(not parameter.numel() for parameter in module.parameters(recurse=False)):
            for name, value in vars(module).items():
                if callable(value) and not isinstance(value, torch.nn.Module) and _can_be_watched(value):
                    yield f"{prefix}.{name}", value


def _can_be_watched(value: object) -> bool:
    return not isinstance(value, type) and getattr(type(value), "__weakrefoffset__", 0) != 0


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    # Not `state_dict`, which leaves out buffers that are not persistent, such as the angles of rotary
    # embeddings.
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        yield from _plain_tensors(name, value)


def _numbers(model: torch.nn.Module) -> Iterator[tuple[str, float]]:
    """Yield the numbers by which layers compute, such as the scales of attention: those of modules and of
    their attention kernels.

    No tensor of several numbers: vLLM keeps caches and scratch memory in the same way, which change with each
    pass.
    """
    import torch

    for prefix, module in model.named_modules():
        for owner, value in ((prefix, module), (f"{prefix}.impl", getattr(module, "impl", None))):
            for name, number in sorted(getattr(value, "__dict__", {}).items()):
                if isinstance(number, float):
                    yield f"{owner}.{name}", number
                elif isinstance(number, torch.Tensor) and number.dim() == 0 and number.device.type == "cpu":
                    yield f"{owner}.{name}", number.item()


def _plain_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that hold the bytes of one that is only a form around others."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    if isinstance(partitions := getattr(tensor, "partitions", None), dict):
        for index, part in partitions.items():
            yield from _plain_tensors(f"{name}.{index}", part)
    elif is_traceable_wrapper_subclass(tensor):
        for inner in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(f"{name}.{inner}", getattr(tensor, inner))
    else:
        yield name, tensor


def digest_of(tensor: torch.Tensor) -> str:
    """Hash the memory behind a tensor, as it lies there; on a GPU by sums that the GPU computes."""
    import torch

    data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    if data.device.type == "cpu":
        return hashlib.sha256(data.numpy().data).hexdigest()
    return hashlib.sha256(repr(sums_of(data)).encode()).hexdigest()


def sums_of(data: torch.Tensor) -> list[int]:
    """Sum bytes with weights that depend on their position, so that any single change, and almost any other,
    changes a sum.

    It is a checksum: it finds changes, but does not withstand someone who looks for two contents with the
    same sums.
    """
    import torch

    num_words = data.numel() // 8
    rest = data[num_words * 8 :].tolist()
    words = data[: num_words * 8].view(torch.int64)
    factors = _factors(min(num_words, _PORTION_WORDS), data.device)
    parts = [words[first : first + _PORTION_WORDS] for first in range(0, num_words, _PORTION_WORDS)]
    sums = [(part * by[: part.numel()]).sum() for part in parts for by in factors]
    return [*(torch.stack(sums).tolist() if sums else ()), *rest]


def _factors(num: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences of odd 64-bit numbers without pattern: multiplying by an odd number loses nothing."""
    import torch

    mixed = torch.arange(1, num + 1, dtype=torch.int64, device=device) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return mixed | 1, (mixed ^ (mixed >> 32)) * -7723592293110705685 | 1


_LOADED: weakref.WeakKeyDictionary[Any, LoadedWeights] = weakref.WeakKeyDictionary()


def stamp_in_worker(worker: Any, is_loaded_anew: bool) -> str:
    """Hash the weights of a worker's model; vLLM runs this in each worker."""
    model = worker.get_model()
    return _LOADED.setdefault(model, LoadedWeights()).stamp(model, is_loaded_anew=is_loaded_anew)


def files_in_worker(worker: Any) -> str:
    """Hash the files that a worker loaded its weights from last; vLLM runs this in each worker."""
    return weights_of_files(worker.vllm_config)


def begin_anew_in_worker(worker: Any, weights: str, why: str) -> None:
    """End every handoff of a worker, and describe these weights to peers; vLLM runs this in each worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    for connector in _ours(get_kv_transfer_group()):
        connector.begin_anew(weights, why)


# -- where the engine core and the scheduler half are --------------------------------------------------


class WeightsWatch:
    """Compares the weights in the workers' memory with those that the node describes, whenever they may have
    changed.

    Args:
        run: Runs a function in each worker, and returns their answers by rank.
        sides: The scheduler halves of the engine; they describe the same weights.
        sleeping: What of the engine is asleep; of weights that are, the workers may not touch the memory.
    """

    def __init__(
        self,
        run: Callable[..., list[Any]],
        sides: Sequence[SchedulerSide],
        sleeping: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._run = run
        self._sides = sides
        self._sleeping = sleeping
        # The weights that were last loaded from files: those files, how they are described, and their stamps.
        self._files = self._base = ""
        self._loaded: list[str] = []
        self._described: tuple[str, list[str]] = ("", [])
        self._is_known = True
        # Whether the prefix cache may have blocks of other weights than the model.
        self._is_stale = False
        self._has_slept = False

    def before_call(self) -> None:
        """Look at the weights for the first time. Nothing can have changed them yet."""
        if not self._loaded and not self._are_asleep:
            self._files = self._base = self._sides[0].loaded_weights
            self._loaded = self._ask(stamp_in_worker, False)
            self._described = self._base, self._loaded

    def after_call(self) -> None:
        """Look whether the weights changed. If they did, end what was computed with the old ones."""
        # If blocks of others are left, the reset of the prefix cache will look; of weights that are asleep,
        # `after_wake`.
        if not self._is_stale and not self._are_asleep:
            self._compare(self._ask(stamp_in_worker, False))

    def after_reload(self) -> None:
        """Note that the workers loaded their weights from files again, perhaps from others; then as
        `after_call`.
        """
        if self._are_asleep:
            return
        (files, *_), stamps = self._ask(files_in_worker), self._ask(stamp_in_worker, True)
        base, before = self._described
        if (files, stamps) != (self._files, self._loaded):
            # Files need not have all weights. So what there was before is part of the name, and must be
            # known.
            over = _digest([base, *before])
            is_nameable = files != UNKNOWN and UNKNOWN not in before
            self._files, self._base = files, f"{files}, loaded over {over}"
            self._loaded = stamps if is_nameable else [UNKNOWN]
        if not self._is_stale:
            self._compare(self._loaded)

    def cache_was_reset(self) -> None:
        """Note that nothing is left of what was computed until now."""
        for side in self._sides:
            side.has_computed = False
        if self._is_stale:
            self._is_stale = False
            if self._are_asleep:
                self._described = ("", [])  # unlike whatever `after_wake` finds
                return
            self._describe(self._ask(stamp_in_worker, False))

    def before_sleep(self) -> None:
        """Look at the weights while they are there, and end all that would keep vLLM from sleeping."""
        self.before_call()
        self._has_slept = True
        for side in self._sides:
            side.fall_asleep()

    def after_wake(self) -> None:
        """Look at the weights once they are there again; once nothing is asleep, hand over again."""
        if not self._has_slept:
            return
        self.after_call()
        if not self._sleeping():
            self._has_slept = False
            for side in self._sides:
                side.wake_up()

    @property
    def _are_asleep(self) -> bool:
        return "weights" in self._sleeping()

    def _ask(self, function: Callable[..., str], *arguments: object) -> list[str]:
        try:
            return self._run(function, _TIMEOUT_S, arguments)
        except Exception:
            logger.exception("cannot hash the weights of the running model")
            return [UNKNOWN]

    def _compare(self, stamps: list[str]) -> None:
        is_same = (self._base, stamps) == self._described
        if not is_same or (UNKNOWN in stamps and self._is_known):
            self._is_stale = any(side.has_computed for side in self._sides)
            self._describe(stamps)

    def _describe(self, stamps: list[str]) -> None:
        self._described = self._base, stamps
        self._is_known = not self._is_stale and UNKNOWN not in (*stamps, *self._loaded)
        weights, why = self._base, "the node's weights changed in memory"
        if not self._is_known:
            # No other node has this number, so no peer takes these weights for its own.
            remedy = "reset the prefix cache" if self._is_stale else "restart the node"
            weights = f"changed in memory and not known: {remedy} ({secrets.token_hex(4)})"
        elif stamps != self._loaded:
            weights += f", changed in memory to {_digest(stamps)}"
        logger.warning("%s; they are described to peers as %r from now on", why, weights)
        for side in self._sides:
            side.describe_weights(weights if self._is_known else "")
        try:
            self._run(begin_anew_in_worker, _TIMEOUT_S, (weights, why))
        except Exception:
            logger.exception(
                "cannot end the handoffs of weights that are no longer in memory; restart the node"
            )


def _digest(stamps: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(stamps).encode()).hexdigest()[:_SHOWN_DIGITS]


def _ours(connector: Any) -> list[Any]:
    """Return kvferry's connector, which may be one of several in vLLM's MultiConnector."""
    children = getattr(connector, "_connectors", None) or [connector]
    return [child for child in children if hasattr(child, "begin_anew")]


_WATCHES: weakref.WeakKeyDictionary[Any, WeightsWatch] = weakref.WeakKeyDictionary()


def _watch_of(engine_core: Any) -> WeightsWatch | None:
    """Return the watch of an engine; None if it does not hand over by kvferry, or is still being made."""
    scheduler = getattr(engine_core, "scheduler", None)
    if engine_core not in _WATCHES and scheduler is not None:
        sides = [connector.scheduler_side for connector in _ours(scheduler.get_kv_connector())]
        if not sides:
            return None
        executor = engine_core.model_executor
        _WATCHES[engine_core] = WeightsWatch(
            executor.collective_rpc, sides, lambda: getattr(executor, "sleeping_tags", ())
        )
    return _WATCHES.get(engine_core)


def watch_engine_cores() -> None:
    """Have every engine of this process whose connector is kvferry's watch its weights. Idempotent.

    Raises:
        ConfigurationError: this version of vLLM has no such methods.
    """
    from vllm.v1.engine.core import EngineCore

    missing = [
        name
        for name in ("collective_rpc", "reset_prefix_cache", "sleep", "wake_up")
        if not hasattr(EngineCore, name)
    ]
    if missing:
        raise ConfigurationError(
            f"cannot notice changes of the weights: vLLM's EngineCore has no {missing[0]}; use a version of vLLM that "
            "kvferry supports"
        )
    if hasattr(EngineCore.collective_rpc, "is_watched"):
        return
    EngineCore.collective_rpc = _watching_calls(EngineCore.collective_rpc)
    EngineCore.reset_prefix_cache = _watching_resets(EngineCore.reset_prefix_cache)
    EngineCore.sleep = _watching_sleep(EngineCore.sleep)
    EngineCore.wake_up = _watching_wake_up(EngineCore.wake_up)


def _watching_calls(collective_rpc: Callable[..., Any]) -> Callable[..., Any]:
    names = inspect.signature(collective_rpc)

    @wraps(collective_rpc)
    def call(engine_core: Any, *args: Any, **kwargs: Any) -> Any:
        encoder: Any = getattr(getattr(engine_core, "scheduler", None), "ec_connector", None)
        # Before the call: no peer may read what it computes from then on.
        if hasattr(encoder, "weights_may_change"):
            encoder.weights_may_change()
        if (watch := _watch_of(engine_core)) is None:
            return collective_rpc(engine_core, *args, **kwargs)
        watch.before_call()
        try:
            answers = collective_rpc(engine_core, *args, **kwargs)
        except BaseException:
            watch.after_call()  # it may have changed some of the weights
            raise
        if _is_reload(**names.bind(engine_core, *args, **kwargs).arguments):
            watch.after_reload()
        else:
            watch.after_call()
        return answers

    call.is_watched = True  # type: ignore[attr-defined]
    return call


def _is_reload(method: object = None, args: object = None, kwargs: object = None, **_: object) -> bool:
    """Whether a call has the workers load their weights from files, and not from what they are given."""
    given = kwargs if isinstance(kwargs, dict) else {}
    return method == "reload_weights" and not args and given.get("weights_iterator") is None


def _watching_resets(reset_prefix_cache: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(reset_prefix_cache)
    def reset(engine_core: Any, *args: Any, **kwargs: Any) -> Any:
        is_reset = reset_prefix_cache(engine_core, *args, **kwargs)
        if is_reset and (watch := _watch_of(engine_core)) is not None:
            watch.cache_was_reset()
        return is_reset

    return reset


def _watching_sleep(sleep: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(sleep)
    def fall_asleep(engine_core: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        watch = _watch_of(engine_core) if level else None  # level 0 only pauses
        if watch is None:
            return sleep(engine_core, level, *args, **kwargs)
        watch.before_sleep()
        try:
            ended = sleep(engine_core, level, *args, **kwargs)
        except BaseException:
            watch.after_wake()
            raise
        if isinstance(ended, Future):  # vLLM waits for its requests first
            ended.add_done_callback(
                lambda future: watch.after_wake() if future.cancelled() or future.exception() else None
            )
        return ended

    return fall_asleep


def _watching_wake_up(wake_up: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(wake_up)
    def wake(engine_core: Any, *args: Any, **kwargs: Any) -> Any:
        answer = wake_up(engine_core, *args, **kwargs)
        if (watch := _watch_of(engine_core)) is not None:
            watch.after_wake()
        return answer

    return wake
