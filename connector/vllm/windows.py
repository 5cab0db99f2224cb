"""Blocks that an offer needs and that vLLM frees when the request ends: those that only the prompt's last
token sees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..kv_cache_specs import KVCacheSpec

#: A position past every model's windows and chunks.
_FAR = 1 << 40


@dataclass
class _Prompt:
    """A request whose prompt is to be offered.

    Attributes:
        num_tokens: Of its prompt.
        tables: Per group, its blocks so far, also those that vLLM has freed meanwhile; empty before its first
            step.
        held: Group → index in its table → the block that we hold; None until the prompt's last step.
    """

    num_tokens: int
    tables: list[list[int]] = field(default_factory=list)
    held: dict[int, dict[int, Any]] | None = None


class WindowBlocks:
    """Holds what the last token of a prompt sees, until the offer of the prompt has ended.

    A consumer computes that token again. When a request ends, vLLM frees every block that only tokens before
    the next one see, and asks the connector after that. So a reference to these blocks is taken in the step
    that computes the end of the prompt, in the groups whose layers have windows or chunks.

    Args:
        groups: vLLM's index of each group that is handed over → how its layers look back.
    """

    def __init__(self, groups: Mapping[int, KVCacheSpec]) -> None:
        self._groups = {index: spec for index, spec in groups.items() if spec.first_visible_token(_FAR)}
        self._prompts: dict[str, _Prompt] = {}
        self._pool: Any = None

    @property
    def num_requests(self) -> int:
        """Requests that are followed or whose blocks are held."""
        return len(self._prompts)

    def bind(self, pool: Any) -> None:
        """Take vLLM's block pool. Without it nothing is held, and a load that lacks a block fails."""
        self._pool = pool

    def follow(self, request_id: str, num_prompt_tokens: int) -> None:
        """Hold the blocks of a request, which is to be offered, when its prompt is computed."""
        if self._groups and self._pool is not None:
            self._prompts[request_id] = _Prompt(num_prompt_tokens)

    def note_step(self, scheduler_output: Any) -> None:
        """Follow the block tables of the requests in a step that vLLM has just scheduled, and hold what must
        be kept.
        """
        if not self._prompts:
            return
        for request_id in getattr(scheduler_output, "preempted_req_ids", None) or ():
            self._let_go(request_id)
        cached = scheduler_output.scheduled_cached_reqs
        for new in scheduler_output.scheduled_new_reqs:
            self._note(scheduler_output, new.req_id, new.block_ids, new.num_computed_tokens, is_whole=True)
        for request_id, blocks, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            is_whole = request_id in cached.resumed_req_ids
            self._note(scheduler_output, request_id, blocks or (), num_computed, is_whole=is_whole)

    def _note(
        self, scheduler_output: Any, request_id: str, blocks: Any, num_computed: int, *, is_whole: bool
    ) -> None:
        if (prompt := self._prompts.get(request_id)) is None:
            return
        if is_whole:  # all blocks of the request, not only new ones
            self._let_go(request_id)
            prompt.tables = [[] for _ in blocks]
        for table, more in zip(prompt.tables, blocks, strict=False):
            table.extend(more)
        if num_computed + scheduler_output.num_scheduled_tokens[request_id] >= prompt.num_tokens:
            self._hold(prompt)

    def fill(self, request_id: str, tables: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return a finished request's block tables, with the held blocks where vLLM has freed them."""
        filled = [list(table) for table in tables]
        prompt = self._prompts.get(request_id)
        for group, held in ((prompt and prompt.held) or {}).items():
            for index, block in held.items():
                # Not if the request lost its blocks, and ended before it got others.
                if index < len(filled[group]):
                    filled[group][index] = block.block_id
        return filled

    def release(self, request_id: str) -> None:
        """Forget a request, and let go of its blocks."""
        self._let_go(request_id)
        self._prompts.pop(request_id, None)

    def _hold(self, prompt: _Prompt) -> None:
        if prompt.held is not None:
            return
        # vLLM has not freed these yet: in every step it keeps what the first token of the step sees.
        prompt.held = {}
        for group, spec in self._groups.items():
            table, first = prompt.tables[group], spec.first_visible_token(prompt.num_tokens - 1)
            indices = range(first // spec.block_size, -(-prompt.num_tokens // spec.block_size))
            prompt.held[group] = {index: self._pool.blocks[table[index]] for index in indices}
        self._pool.touch([block for held in prompt.held.values() for block in held.values()])

    def _let_go(self, request_id: str) -> None:
        prompt = self._prompts.get(request_id)
        if prompt is not None:
            held, prompt.held = prompt.held or {}, None
            # The last block first, because vLLM uses the first one of them again first.
            self._pool.free_blocks([block for blocks in held.values() for block in reversed(blocks.values())])
