"""Which LoRA adapters count as the same on two nodes."""

from __future__ import annotations

import hashlib
import json
import os
from functools import lru_cache
from typing import Any

#: The files of an adapter's folder that can change an answer.
_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def adapter_identity(lora_request: Any) -> str | None:
    """Name a request's adapter so that equal names mean equal weights; None for a request without an adapter.

    The result is the adapter's name and a hash of its files. vLLM's own prefix cache uses the path instead. But two nodes
    may keep the same adapter at different paths, or different adapters at the same path. An adapter that vLLM fetched
    from a repository has no path of its own, so the repository's name stands for its contents.
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
    name, path = lora_request.lora_name, lora_request.lora_path
    # Both may contain spaces, so without a hash of known length they are written as JSON.
    return f"{name} {contents.hexdigest()}" if found else json.dumps([name, path])


@lru_cache(maxsize=1024)
def _file_digest(path: str, version: tuple[int, int, int]) -> str:
    """Hash a file; only once per version of it, because the engine's loop waits meanwhile."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
