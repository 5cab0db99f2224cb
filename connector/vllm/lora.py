"""Which LoRA adapters count as the same on two nodes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
from functools import lru_cache
from typing import Any

from ...transports.limited_log import LimitedLog

# Any client can cause this line, so it is limited.
_log = LimitedLog(logging.getLogger(__name__), max_lines=1, interval_s=60.0)

#: The files of an adapter's folder that can change an answer.
_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


def adapter_identity(lora_request: Any) -> str | None:
    """Name a request's adapter so that equal names mean equal weights; None for a request without an adapter.

    The result is the adapter's name and a hash of its files. vLLM's own prefix cache uses the path instead.
    But two nodes may keep the same adapter at different paths, or different adapters at the same path. An
    adapter that vLLM fetched from a repository has no path of its own, so the repository's name stands for
    its contents.

    vLLM may have loaded the adapter before its files changed, or after, and its prefix cache may have blocks
    of both. So if the files are others than at the first request for this number and path, the result equals
    no other.
    """
    if not lora_request:
        return None
    name, path = lora_request.lora_name, lora_request.lora_path
    contents = _contents(path)
    if contents != _contents_at_first(lora_request.lora_int_id, path):
        contents = f"changed on disk {secrets.token_hex(8)}"
        _log.warning(
            "not handing over prompts with LoRA adapter %r: its files at %r changed since it was first used; load it from "
            "a new path",
            name,
            path,
        )
    # Both may contain spaces, so without a hash of known length they are written as JSON.
    return f"{name} {contents}" if contents else json.dumps([name, path])


@lru_cache(maxsize=1024)
def _contents_at_first(number: int, path: str) -> str:
    return _contents(path)


def _contents(path: str) -> str:
    """Hash an adapter's files; empty if there are none."""
    contents = hashlib.sha256()
    found = False
    for name in _FILES:
        place = os.path.join(os.path.expanduser(path), name)
        try:
            status = os.stat(place)
            digest = _file_digest(place, (status.st_ino, status.st_size, status.st_mtime_ns))
        except OSError:
            continue
        contents.update(f"{name} {digest}\n".encode())
        found = True
    return contents.hexdigest() if found else ""


@lru_cache(maxsize=1024)
def _file_digest(path: str, version: tuple[int, int, int]) -> str:
    """Hash a file; only once per version of it, because the engine's loop waits meanwhile."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
