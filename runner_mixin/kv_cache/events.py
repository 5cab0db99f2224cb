"""What enters the prefix cache and leaves it, as vLLM's KV events say it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .block_hash import HashableRequest, generate_block_hash_extra_keys, get_block_hash, get_group_id
from .kv_cache_manager import KVCacheManager


class CacheEvents:
    """The events of a manager's prefix cache since they were taken last.

    From now on the manager records its changes.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._block_size = manager.block_size
        self._changes = manager.record_changes()
        self._events: list[dict[str, Any]] = []

    def note(self, request: HashableRequest) -> None:
        """Note what the manager has just cached of a request, whose token ids a change does not say."""
        stored: dict[int, set[bytes]] = {}
        removed = []
        for change in self._changes:
            is_stored, key = change
            if is_stored:
                stored.setdefault(get_group_id(key), set()).add(get_block_hash(key))
            else:
                removed.append(change)
        self._changes[:] = removed
        self._note_removed()
        for group_id, hashes in stored.items():
            numbers = [number for number, known in enumerate(request.block_hashes) if known in hashes]
            for first, end in _runs(numbers):
                self._events.append(self._stored(request, group_id, first, end))

    def take(self) -> list[dict[str, Any]]:
        """Return the events, in the order in which they happened."""
        self._note_removed()
        events, self._events = self._events, []
        return events

    def _note_removed(self) -> None:
        for _, key in self._changes:
            event = {
                "type": "BlockRemoved",
                "block_hashes": [get_block_hash(key)],
                "medium": "GPU",
                "group_idx": get_group_id(key),
            }
            self._events.append(event)
        self._changes.clear()

    def _stored(self, request: HashableRequest, group_id: int, first: int, end: int) -> dict[str, Any]:
        size, hashes = self._block_size, request.block_hashes
        extra_keys = []
        for number in range(first, end):
            keys, _ = generate_block_hash_extra_keys(request, number * size, (number + 1) * size, 0)
            # Without their kinds, as vLLM has them.
            extra_keys.append(keys and [key[1:] if key[0] == "mm" else key[1] for key in keys])
        return {
            "type": "BlockStored",
            "block_hashes": list(hashes[first:end]),
            "parent_block_hash": hashes[first - 1] if first else None,
            "token_ids": list(request.all_token_ids[first * size : end * size]),
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": request.lora_id,
            "extra_keys": extra_keys if any(extra_keys) else None,
            "group_idx": group_id,
        }


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number of each run without a gap, and the one after its last."""
    first = 0
    for index in range(1, len(numbers) + 1):
        if index == len(numbers) or numbers[index] != numbers[index - 1] + 1:
            yield numbers[first], numbers[index - 1] + 1
            first = index
