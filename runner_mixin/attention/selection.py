"""Choose a node's attention backend: by name, or the best one that works on its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...transports.errors import BackendUnavailableError, ConfigurationError
from ...transports.loading import load_class
from .backend import AttentionBackend

if TYPE_CHECKING:
    import torch

    from ...connector.config import PageOrder

#: Name → `module:class`, best first. A class is imported when it is first needed.
_BACKENDS = {
    "FLASHINFER": "kvferry.runner_mixin.attention.flashinfer_backend:FlashInferBackend",
    "TORCH": "kvferry.runner_mixin.attention.torch_backend:TorchAttentionBackend",
    "TORCH_HND": "kvferry.runner_mixin.attention.torch_backend:TorchHeadsFirstBackend",
}


def attention_backend_names() -> tuple[str, ...]:
    """Return the names of all backends, best first. Not every backend works on every device."""
    return tuple(_BACKENDS)


def register_attention_backend(name: str, path: str) -> None:
    """Register an out-of-tree backend. `"auto"` chooses it only if no other backend works.

    Args:
        name: The name that users write; an earlier backend of the same name is replaced.
        path: `module:class`.
    """
    _BACKENDS[name] = path


def select_attention_backend(
    device: torch.device, dtype: torch.dtype, name: str = "auto", kv_cache_layout: PageOrder = "NHD"
) -> type[AttentionBackend]:
    """Choose a backend.

    Args:
        device: Where the cache is.
        dtype: The model's type, in which attention is computed.
        name: A backend's name, in upper or lower case, or `"auto"`.
        kv_cache_layout: The page order of the cache.

    Raises:
        ConfigurationError: no backend has this name, or its class cannot be loaded.
        BackendUnavailableError: the backend cannot compute in `dtype` on `device`, or has another page order;
            the message says why.
    """
    if name == "auto":
        return _first_available(device, dtype, kv_cache_layout)
    path = _BACKENDS.get(name) or _BACKENDS.get(name.upper())
    if path is None:
        raise ConfigurationError(
            f"unknown attention backend {name!r}; known: auto, {', '.join(_BACKENDS)}",
            key="attention_backend",
            value=name,
        )
    backend = _load(name, path)
    reason = _unavailable_reason(backend, device, dtype, kv_cache_layout)
    if reason:
        raise BackendUnavailableError(f"attention backend {name} cannot work on {device}: {reason}")
    return backend


def _first_available(
    device: torch.device, dtype: torch.dtype, kv_cache_layout: PageOrder
) -> type[AttentionBackend]:
    reasons = []
    for name, path in _BACKENDS.items():
        backend = _load(name, path)
        reason = _unavailable_reason(backend, device, dtype, kv_cache_layout)
        if not reason:
            return backend
        reasons.append(f"{name}: {reason}")
    raise BackendUnavailableError(f"no attention backend works on {device}: {'; '.join(reasons)}")


def _unavailable_reason(
    backend: type[AttentionBackend], device: torch.device, dtype: torch.dtype, kv_cache_layout: PageOrder
) -> str:
    own_layout = backend.get_page_order()
    if own_layout != kv_cache_layout:
        return f"its page order is {own_layout}, not {kv_cache_layout}"
    return backend.get_unavailable_reason(device, dtype)


def _load(name: str, path: str) -> type[AttentionBackend]:
    return load_class(path, AttentionBackend, what=f"attention backend {name!r}", key="attention_backend")
