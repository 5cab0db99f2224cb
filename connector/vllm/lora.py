"""Which LoRA adapters count as the same one on two nodes."""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from typing import Any

#: What an adapter's folder has of an adapter; what else lies there does not change an answer.
_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def adapter_identity(lora_request: Any) -> str | None:
    """Name a request's adapter so that equal names mean equal weights; None for a request without one.

    Beside the adapter's name that is a hash of its files. vLLM's own prefix cache takes the path instead, but two nodes
    keep one adapter at different paths, and at equal paths perhaps two. A repository that vLLM fetched has no path of its
    own: its name stands for its contents.
    """
    if not lora_request:
        return None
    folder = os.path.expanduser(lora_request.lora_path)
    contents = hashlib.sha256()
    found = False
    for name in _FILES:
        path = os.path.join(folder, name)
        try:
            status = os.stat(path)
            digest = _file_digest(path, (status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            continue
        contents.update(f"{name} {digest}\n".encode())
        found = True
    return f"{lora_request.lora_name} {contents.hexdigest() if found else lora_request.lora_path}"


@lru_cache(maxsize=1024)
def _file_digest(path: str, version: tuple[int, int, int]) -> str:
    """Hash a file; once per version of it, since the engine's loop waits meanwhile."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
