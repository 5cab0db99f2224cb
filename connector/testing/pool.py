"""The blocks of a model-free node: which are free, and what each must contain."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from .broken import promise
from .values import POISON, Journal, TokenValues

if TYPE_CHECKING:
    from .shapes import CacheShape


class Pool:
    """Caches of all layers, and a second copy of what they must contain.

    Free blocks are poisoned: a connector that reads or loads one by mistake moves contents that no token has.

    Attributes:
        caches: Each rank's, `(num_layers, num_blocks, 2, block_size, num_kv_heads, head_size)`, in logical
            order. The heads of a rank follow those of the rank before.
        free_blocks: Block 0 is never among them: engines use it as padding.
    """

    def __init__(self, shape: CacheShape, caches: Sequence[torch.Tensor], journal: Journal) -> None:
        self.shape = shape
        self.caches = caches
        self.free_blocks = list(range(1, shape.num_blocks))
        self.journal = journal
        for cache in caches:
            cache[:] = POISON
        self._expected = self.read()
        self._loaded_by: dict[int, str] = {}

    # -- the allocator -------------------------------------------------------------------------------

    def allocate(self, num_blocks: int) -> list[int]:
        """Take the blocks that have been free for longest, so that a request that starts over gets other
        ones.
        """
        at = len(self.free_blocks) - num_blocks
        taken, self.free_blocks = self.free_blocks[at:][::-1], self.free_blocks[:at]
        return taken

    def free(self, block_ids: Iterable[int]) -> None:
        """Return blocks. Their contents are gone from this moment."""
        blocks = list(block_ids)
        self.free_blocks[:0] = blocks[::-1]
        self.poison(blocks)

    def poison(self, block_ids: Collection[int]) -> None:
        """Overwrite what blocks contain."""
        self._write(list(block_ids), POISON)

    # -- contents ------------------------------------------------------------------------------------

    def read(self) -> torch.Tensor:
        """Return a copy of all ranks' caches as one, `(num_layers, num_blocks, 2, block_size, num_kv_heads,
        head_size)`.
        """
        return torch.cat(list(self.caches), dim=-2)

    def _parts(self, heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split contents, `(…, num_kv_heads, head_size)`, into those of the ranks."""
        return heads.tensor_split(len(self.caches), dim=-2)

    def _write(self, block_ids: list[int], contents: torch.Tensor | float) -> None:
        self._expected[:, block_ids] = contents
        for cache, part in zip(self.caches, self._parts(self._expected[:, block_ids]), strict=True):
            cache[:, block_ids] = part

    def write(self, block_ids: Sequence[int], contents: torch.Tensor) -> None:
        """Put contents, `(num_layers, num_block_ids, …)`, into blocks."""
        self._write(list(block_ids), contents)

    def fill(self, block_ids: Sequence[int], seed: int) -> None:
        """Put random numbers into blocks."""
        generator = torch.Generator().manual_seed(seed)
        for block in block_ids:
            page = torch.rand((self.shape.num_layers, *self.shape.logical_page), generator=generator)
            self._write([block], page.to(self.shape.dtype)[:, None])

    def write_tokens(
        self, table: Sequence[int], first: int, values: torch.Tensor, layers: Iterable[int]
    ) -> None:
        """Write the values of tokens from `first` on, `(num_layers, num_tokens, …)`, into some layers."""
        blocks, slots = self._places(table, first, first + values.shape[1])
        for layer in layers:
            self._expected[layer, blocks, :, slots] = values[layer]
            for cache, part in zip(self.caches, self._parts(values[layer]), strict=True):
                cache[layer, blocks, :, slots] = part

    def _places(self, table: Sequence[int], first: int, last: int) -> tuple[list[int], list[int]]:
        """Return the block and the slot of each token."""
        size = self.shape.block_size
        return [table[token // size] for token in range(first, last)], [
            token % size for token in range(first, last)
        ]

    # -- what must hold ------------------------------------------------------------------------------

    def accept(self, request_id: str, block_ids: Collection[int]) -> None:
        """Take the contents of blocks as they are now, because a load into them has ended."""
        blocks = list(block_ids)
        self._expected[:, blocks] = torch.cat([cache[:, blocks] for cache in self.caches], dim=-2)
        self._loaded_by.update(dict.fromkeys(blocks, request_id))

    def wrong_token(
        self, table: Sequence[int], first: int, last: int, values: TokenValues, layers: Iterable[int]
    ) -> str:
        """Describe the first token, of `first` to `last - 1`, that has wrong values; empty if there
        is none.
        """
        known = values.between(first, last)
        blocks, slots = self._places(table, first, last)
        for layer in layers:
            found = torch.cat([cache[layer, blocks, :, slots] for cache in self.caches], dim=-2)
            is_wrong = (found != known[layer]).flatten(1).any(dim=1).nonzero()
            if len(is_wrong):
                index = int(is_wrong[0])
                return (
                    f"token {first + index} of request {values.request.request_id!r} (layer {layer}, block {blocks[index]}, "
                    f"slot {slots[index]}) has {self.journal.name(found[index])}"
                )
        return ""

    def check_untouched(self, loading: Collection[int], owner: Callable[[int], str]) -> None:
        """Check that no block changed, except those that are being loaded.

        Args:
            owner: Returns what a block is used for, for the message.

        Raises:
            BrokenPromiseError: something else was written.
        """
        cache = self.read()
        if torch.equal(cache, self._expected):
            return
        is_changed = (cache != self._expected).transpose(0, 1).flatten(1).any(dim=1)
        for block in is_changed.nonzero().flatten().tolist():
            if block in loading:
                continue
            layer, _, slot = (cache[:, block] != self._expected[:, block]).nonzero()[0][:3].tolist()
            found = self.journal.name(cache[layer, block, :, slot])
            seen = f"block {block}, {owner(block)}, was overwritten: slot {slot} of layer {layer} now has {found}"
            loaded_by = self._loaded_by.get(block)
            promise(
                "nothing is written into the blocks of a load after its end was reported",
                kept=loaded_by is None,
                seen=f"{seen}; the load of request {loaded_by!r} into it was over",
            )
            promise("only blocks that a load was ordered for are written", kept=False, seen=seen)
