"""Digests of a model's weights, configuration, tokenizer and chat template: do two nodes run the same
model?
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ...transports.errors import ConfigurationError
from .digest_cache import DigestCache, entry_name

logger = logging.getLogger(__name__)

#: Names of weight files, in the order in which loaders prefer them. The first pattern that matches any file
#: counts.
WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "*.bin", "*.pt", "*.gguf")
#: Files that training leaves beside the weights, with names that match the patterns.
_NOT_WEIGHTS = frozenset(
    {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pt"}
)
#: Files are hashed in parts of this size, so that several threads can share a large file. Digests depend on
#: it: if you change it, change the name of the `digest_cache` folder as well.
_PART_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_MAX_THREADS = 8
#: Above this many bytes, hashing takes long enough to show its progress.
_BAR_ABOVE_BYTES = 1 << 30
_SHOWN_DIGITS = 16

#: Keys of a configuration that say where it came from or which library wrote it. The dtype is compared
#: separately.
_VOLATILE = frozenset({"transformers_version", "torch_dtype", "dtype"})
#: If there is no `tokenizer.json`, those of these files that exist are hashed.
_TOKENIZER_FILES = (
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)
#: Keys of `tokenizer_config.json` that do not change which tokens a text becomes.
_NOT_TOKENIZING = frozenset(
    {
        "auto_map",
        "backend",
        "chat_template",
        "is_local",
        "model_max_length",
        "name_or_path",
        "processor_class",
        "tokenizer_class",
        "transformers_version",
    }
)


# -- weights -----------------------------------------------------------------------------------------


def find_weight_files(folder: Path, patterns: Sequence[str] = WEIGHT_PATTERNS) -> list[Path]:
    """List a folder's weight files, sorted by name: those of the first pattern that matches any; empty if
    none does.
    """
    for pattern in patterns:
        found = [path for path in folder.glob(pattern) if path.name not in _NOT_WEIGHTS]
        if found:
            return sorted(found)
    return []


def weights_digest(
    files: Sequence[Path], cache: DigestCache | None = None, *, bar_above_bytes: int = _BAR_ABOVE_BYTES
) -> str:
    """Hash every byte of weight files; the names of the files make no difference.

    Args:
        files: At least one.
        cache: Where digests of files are kept; by default the user's.
        bar_above_bytes: If more than this must be read, a progress bar shows it on standard error.

    Returns:
        16 hexadecimal digits.

    Raises:
        ConfigurationError: a file cannot be read to its end; the error names it. Nothing was cached for it.
    """
    cache = cache or DigestCache.default()
    known = _look_up(files, cache)
    if None in known.values():
        found = [_stat(path) for path in files]
        # If no file is large enough for the cache, waiting for another rank gains nothing.
        is_kept = any(file.st_size >= cache.min_bytes for file in found)
        name = _text_digest("\n".join(map(entry_name, found)))
        with cache.locked(name) if is_kept else nullcontext():
            # Another rank may have hashed them while this one waited for the lock.
            known = _look_up(files, cache)
            missing = [path for path, digest in known.items() if digest is None]
            known |= _hash_files(missing, cache, bar_above_bytes)
    return _text_digest("\n".join(sorted(digest for digest in known.values() if digest)))[:_SHOWN_DIGITS]


def _look_up(files: Sequence[Path], cache: DigestCache) -> dict[Path, str | None]:
    return {path: cache.get(_stat(path)) for path in files}


def _hash_files(files: Sequence[Path], cache: DigestCache, bar_above_bytes: int) -> dict[Path, str]:
    """Hash files in parts, several at a time: hashing releases the interpreter's lock."""
    before = {path: _stat(path) for path in files}
    parts: dict[Path, list[bytes]] = {
        path: [b""] * -(-found.st_size // _PART_BYTES) for path, found in before.items()
    }
    num_bytes = sum(found.st_size for found in before.values())
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with (
        _progress(num_bytes, bar_above_bytes) as advance,
        ThreadPoolExecutor(threads, "kvferry-hash") as pool,
    ):
        futures = {}
        for path, found in before.items():
            for index in range(len(parts[path])):
                start = index * _PART_BYTES
                size = min(_PART_BYTES, found.st_size - start)
                futures[pool.submit(_hash_part, path, start, size)] = path, index, size
        try:
            for future in as_completed(futures):
                path, index, size = futures[future]
                parts[path][index] = future.result()
                advance(size)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    digests = {}
    for path, found in before.items():
        digests[path] = hashlib.sha256(b"".join(parts[path])).hexdigest()
        if entry_name(_stat(path)) == entry_name(found):
            cache.put(found, digests[path])
        else:
            logger.warning("%s changed while it was hashed; start the node again if it was replaced", path)
    return digests


def _hash_part(path: Path, start: int, size: int) -> bytes:
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(size, _READ_BYTES)))
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while size:
                num_read = file.readinto(buffer[: min(size, len(buffer))])
                if not num_read:
                    raise OSError("it became shorter while it was hashed")
                digest.update(buffer[:num_read])
                size -= num_read
    except OSError as error:
        raise _unreadable(path, error) from error
    return digest.digest()


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"cannot hash the weight file {str(path)!r}: {error.strerror or error}; every byte of it must be readable, "
        "because peers are admitted only with the same weights",
        key="model",
        value=str(path),
    )


@contextmanager
def _progress(num_bytes: int, bar_above_bytes: int) -> Iterator[Callable[[int], object]]:
    """Show a bar on standard error if there is much to hash.

    Call the yielded function with each number of bytes done.
    """
    if num_bytes <= bar_above_bytes:
        yield lambda size: None
        return
    text = "hashing the model's weights (once)"
    try:
        from tqdm import tqdm
    except ImportError:
        logger.info("%s: %.1f GiB", text, num_bytes / (1 << 30))
        yield lambda size: None
        return

    class Bar(tqdm):  # type: ignore[type-arg]
        monitor_interval = 0  # otherwise tqdm starts a thread that never ends
        _lock = threading.RLock()  # otherwise tqdm makes a semaphore that outlives the bar

    # In a log file every update is a new line, so one every few seconds is enough.
    interval_s = 0.2 if sys.stderr.isatty() else 5.0
    with Bar(desc=text, total=num_bytes, unit="B", unit_scale=True, mininterval=interval_s) as bar:
        yield bar.update


# -- configuration, tokenizer, chat template ---------------------------------------------------------


def read_configuration(folder: Path) -> dict[str, Any]:
    """Read a folder's `config.json`.

    Raises:
        ConfigurationError: there is none, or it is not a JSON object; the error names the file.
    """
    path = folder / "config.json"
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot read {str(path)!r}: {error}; a model folder needs its config.json",
            key="model",
            value=str(folder),
        ) from error
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"cannot read {str(path)!r}: it is not a JSON object", key="model", value=str(folder)
        )
    return content


def configuration_digest(configuration: Mapping[str, Any]) -> str:
    """Hash a model's configuration, without the keys that say where it came from and which library wrote it.

    Returns:
        16 hexadecimal digits.
    """
    return _json_digest(_lasting(configuration))


def tokenizer_digest(folder: Path) -> str:
    """Hash the files and settings that decide which tokens a text becomes.

    Returns:
        16 hexadecimal digits; empty if the folder has no tokenizer, or one that cannot be read.
    """
    try:
        path = folder / "tokenizer.json"
        if path.is_file():
            contents: dict[str, Any] = {path.name: json.loads(path.read_bytes())}
        else:
            names = [*_TOKENIZER_FILES, *sorted(path.name for path in folder.glob("*.tiktoken"))]
            files = [folder / name for name in names if (folder / name).is_file()]
            contents = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        settings = _tokenizer_config(folder)
    except (OSError, ValueError):
        return ""
    if not contents:
        return ""
    rest = {key: value for key, value in settings.items() if key not in _NOT_TOKENIZING}
    return _json_digest({"files": contents, "settings": rest})


def chat_template_digest(folder: Path) -> str:
    """Hash the template that turns messages into a prompt, in whichever of its possible files it is.

    Returns:
        16 hexadecimal digits; empty if the folder has no template, or one that cannot be read.
    """
    try:
        path = folder / "chat_template.jinja"
        template = path.read_text() if path.is_file() else _tokenizer_config(folder).get("chat_template")
        more = {path.name: path.read_text() for path in folder.glob("additional_chat_templates/*.jinja")}
        if not template and (path := folder / "chat_template.json").is_file():
            template = json.loads(path.read_bytes())["chat_template"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return _json_digest([template, more]) if template or more else ""


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_bytes()) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def _lasting(value: Any) -> Any:
    """Remove volatile keys at any depth; all keys of a quantization are kept."""
    if not isinstance(value, Mapping):
        return [_lasting(item) for item in value] if isinstance(value, list | tuple) else value
    return {
        str(key): item if key == "quantization_config" else _lasting(item)
        for key, item in value.items()
        if key not in _VOLATILE and not str(key).startswith("_")
    }


def _json_digest(content: Any) -> str:
    return _text_digest(json.dumps(content, sort_keys=True, default=_plain))[:_SHOWN_DIGITS]


def _plain(value: object) -> str:
    """Convert what JSON cannot express to text; never to text with a memory address, which differs between
    processes.
    """
    kind = type(value)
    has_own_text = kind.__str__ is not object.__str__ or kind.__repr__ is not object.__repr__
    return str(value) if has_own_text else kind.__qualname__


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
