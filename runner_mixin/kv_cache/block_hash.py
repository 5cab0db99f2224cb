"""Name the contents of a full block by a hash of it and everything before it."""

from __future__ import annotations

import hashlib
import logging
import secrets
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NewType, Protocol

import msgpack

logger = logging.getLogger(__name__)

BlockHash = NewType("BlockHash", bytes)
"""Hash of a full block's tokens and extra keys, and of all blocks before it."""

BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)
"""A block hash followed by the group's id in 4 bytes.

Each group caches the same tokens in its own blocks.
"""

HashFunction = Callable[[object], bytes]
"""Maps a value made of None, bool, int, float, str, bytes and sequences of these to its hash."""

ExtraKeys = tuple[tuple[object, ...], ...]

_GROUP_ID_BYTES = 4


def sha256(value: object) -> bytes:
    """Hash a value by content: 32 bytes, the same in every process and on every machine.

    The value is encoded as MessagePack, which encodes equal values alike (a tuple and a list with the same
    members are equal) and different values differently.

    Raises:
        TypeError: the value has a part that MessagePack cannot encode.
        OverflowError: an integer has more than 64 bits.
    """
    return hashlib.sha256(msgpack.packb(value, unicode_errors="surrogatepass")).digest()


_CONTENT_HASHES: frozenset[HashFunction] = frozenset({sha256})
_none_hash = BlockHash(secrets.token_bytes(32))


def init_none_hash(hash_fn: HashFunction, seed: str) -> None:
    """Set the parent of every first block, and with it all hashes from now on, from a seed.

    Processes that use the same hash function and seed agree on every hash. Call this before the first block
    is hashed. Without a call, or with an empty seed, the parent is random and no other process can guess a
    hash.
    """
    global _none_hash
    if seed:
        _none_hash = BlockHash(hash_fn(("kvferry.none_hash", seed)))
        return
    if hash_fn in _CONTENT_HASHES:
        logger.warning(
            "block hashes differ from those of other processes: hash_seed is empty; set it to the same value on every "
            "node to share them"
        )
    _none_hash = BlockHash(secrets.token_bytes(32))


def none_hash() -> BlockHash:
    """Return the parent of every first block in this process (`NONE_HASH`)."""
    return _none_hash


def make_block_hash_with_group_id(block_hash: BlockHash, group_id: int) -> BlockHashWithGroupId:
    """Return the prefix cache's key for a block of a group."""
    return BlockHashWithGroupId(block_hash + group_id.to_bytes(_GROUP_ID_BYTES, "big"))


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    """Return the block hash in a key."""
    return BlockHash(key[:-_GROUP_ID_BYTES])


def get_group_id(key: BlockHashWithGroupId) -> int:
    """Return the group id in a key."""
    return int.from_bytes(key[-_GROUP_ID_BYTES:], "big")


@dataclass(frozen=True)
class MultiModalFeature:
    """An image, a sound, …: placeholder tokens whose ids do not say what they stand for.

    Attributes:
        identifier: Hash of the item's contents.
        offset: Position of its first placeholder among the request's tokens.
        length: Number of placeholders.
    """

    identifier: str
    offset: int
    length: int


class HashableRequest(Protocol):
    """The part of an engine's request that hashing reads. Hashing changes nothing in it."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """The prompt and the generated tokens."""

    @property
    def block_hashes(self) -> Sequence[BlockHash]:
        """All hashes that the hasher has returned so far."""

    @property
    def cache_salt(self) -> str | None:
        """Separates caches: requests with different salts never share one."""

    @property
    def lora_id(self) -> str | None:
        """Name of the LoRA adapter that the request runs with."""

    @property
    def mm_features(self) -> Sequence[MultiModalFeature]:
        """The items in the prompt, by increasing offset, without overlap."""


def need_extra_keys(request: HashableRequest) -> bool:
    """Return whether the request's blocks depend on more than its token ids."""
    return bool(request.mm_features) or request.lora_id is not None or request.cache_salt is not None


def generate_block_hash_extra_keys(
    request: HashableRequest, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[ExtraKeys | None, int]:
    """Return what the block of tokens `[start_token_idx, end_token_idx)` depends on besides token ids.

    Every key begins with its kind, so that an adapter and a salt of the same name differ. An item's key
    contains its offset from the block's first token, which is negative if the item began before; so two
    blocks within one item differ.

    Args:
        start_mm_idx: The first item that may reach into the block. A negative value counts from the last, so
            -1 is right for a block after the prompt.

    Returns:
        `(keys, mm_idx)`: the keys, or None if there are none; and `start_mm_idx` for the next block.
    """
    keys: list[tuple[object, ...]] = []
    if request.lora_id is not None:
        keys.append(("lora", request.lora_id))
    mm_keys, next_mm_idx = _multi_modal_keys(
        request.mm_features, start_token_idx, end_token_idx, start_mm_idx
    )
    keys += mm_keys
    if start_token_idx == 0 and request.cache_salt is not None:
        keys.append(("salt", request.cache_salt))
    return (tuple(keys) or None), next_mm_idx


def _multi_modal_keys(
    features: Sequence[MultiModalFeature], start: int, end: int, mm_idx: int
) -> tuple[list[tuple[object, ...]], int]:
    if mm_idx < 0:
        mm_idx = max(0, len(features) + mm_idx)
    keys: list[tuple[object, ...]] = []
    while mm_idx < len(features):
        feature = features[mm_idx]
        if feature.offset >= end:
            break
        feature_end = feature.offset + feature.length
        if feature_end > start:
            keys.append(("mm", feature.identifier, feature.offset - start))
        if feature_end > end:
            break
        mm_idx += 1
    return keys, mm_idx


def _first_reaching(features: Sequence[MultiModalFeature], token_idx: int) -> int:
    """Return the index of the first item that ends after `token_idx`."""
    return bisect_right(features, token_idx, key=lambda feature: feature.offset + feature.length)


def hash_block_tokens(
    hash_fn: HashFunction,
    parent_block_hash: BlockHash | None,
    curr_block_token_ids: Sequence[int],
    extra_keys: ExtraKeys | None = None,
) -> BlockHash:
    """Hash a full block.

    Args:
        parent_block_hash: Hash of the block before it; None for the first block, whose parent is
            `none_hash()`.
        curr_block_token_ids: `(block_size,)` token ids of the block.
        extra_keys: What else the block's contents depend on; see `generate_block_hash_extra_keys`.
    """
    parent = none_hash() if parent_block_hash is None else parent_block_hash
    return BlockHash(hash_fn((parent, tuple(curr_block_token_ids), extra_keys)))


def get_request_block_hasher(
    block_size: int, hash_fn: HashFunction
) -> Callable[[HashableRequest], list[BlockHash]]:
    """Make the function that hashes those full blocks of a request that have no hash yet.

    The function returns the new hashes, and the engine appends them to `request.block_hashes`. Call it when
    the request arrives, and again as tokens are appended. Its cost depends only on the number of new tokens.

    Raises:
        ValueError: `block_size` is not positive.
    """
    if block_size <= 0:
        raise ValueError(f"block_size={block_size} is not positive")

    def hash_new_blocks(request: HashableRequest) -> list[BlockHash]:
        hashed = len(request.block_hashes)
        parent = request.block_hashes[-1] if hashed else None
        mm_idx = _first_reaching(request.mm_features, hashed * block_size)
        new_hashes: list[BlockHash] = []
        tokens = request.all_token_ids
        for start in range(hashed * block_size, len(tokens) - block_size + 1, block_size):
            end = start + block_size
            extra_keys, mm_idx = generate_block_hash_extra_keys(request, start, end, mm_idx)
            parent = hash_block_tokens(hash_fn, parent, tokens[start:end], extra_keys)
            new_hashes.append(parent)
        return new_hashes

    return hash_new_blocks
