"""The description of one step for attention: a ragged batch, and each group's blocks and slots.

The tokens of a step lie one request after another in a flat run of `num_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class StepBatch:
    """The requests of one step; the same for every group.

    Attributes:
        query_start_loc: `(num_reqs + 1,)` int32, on the device: where each request's tokens begin, and the
            end of the last.
        query_start_loc_cpu: The same on the CPU.
        seq_lens: `(num_reqs,)` int32, on the device: tokens computed before this step plus those of this
            step.
        seq_lens_cpu: The same on the CPU.
        num_computed_tokens_cpu: `(num_reqs,)` int32, on the CPU: tokens computed before this step.
        num_reqs: Number of requests.
        num_tokens: Number of tokens of this step.
        max_query_len: The largest number of tokens of one request.
        max_seq_len: The longest sequence.
        causal: Whether a token sees only itself and the tokens before it.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    num_computed_tokens_cpu: torch.Tensor
    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    causal: bool

    @classmethod
    def from_lens(
        cls,
        query_lens: Sequence[int],
        num_computed_tokens: Sequence[int],
        device: torch.device,
        *,
        causal: bool = True,
    ) -> StepBatch:
        """Make the batch of one step.

        Args:
            query_lens: Number of tokens of each request in this step, at least one.
            num_computed_tokens: Number of tokens of each request that were computed before this step.

        Raises:
            ValueError: there is no request, a request has no token, or the lists differ in length.
        """
        queries = np.asarray(query_lens, dtype=np.int32)
        computed = np.asarray(num_computed_tokens, dtype=np.int32)
        if queries.shape != computed.shape or not queries.size or queries.min() < 1 or computed.min() < 0:
            raise ValueError(
                f"a step needs at least one request, and one token or more per request; got {queries.tolist()} new and "
                f"{computed.tolist()} computed tokens"
            )
        starts = torch.from_numpy(np.concatenate([[0], np.cumsum(queries)]).astype(np.int32))
        seq_lens = torch.from_numpy(queries + computed)
        return cls(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(device),
            seq_lens_cpu=seq_lens,
            num_computed_tokens_cpu=torch.from_numpy(computed),
            num_reqs=len(queries),
            num_tokens=int(queries.sum()),
            max_query_len=int(queries.max()),
            max_seq_len=int(seq_lens.max()),
            causal=causal,
        )


@dataclass(frozen=True)
class CommonAttentionMetadata(StepBatch):
    """One step of one group.

    Attributes:
        block_table: `(num_reqs, max_blocks)` int32, on the device: kernel block ids. Only those that hold
            visible tokens are read.
        slot_mapping: `(num_tokens,)` int64, on the device: the slot of each token.
    """

    block_table: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """A backend's metadata for one step of one group; each backend derives its own class.

    Attributes:
        common: The batch.
    """

    common: CommonAttentionMetadata


def compute_slot_mapping(block_table: torch.Tensor, batch: StepBatch, block_size: int) -> torch.Tensor:
    """Compute the slot of each token of a step: `block_id * block_size + offset`.

    Args:
        block_table: `(num_reqs, max_blocks)` int32: the manager's block ids; its device is the result's.
        block_size: Tokens per block of the manager.

    Returns:
        `(num_tokens,)` int64.
    """
    query_lens = batch.query_start_loc_cpu.diff()
    request = torch.repeat_interleave(torch.arange(batch.num_reqs), query_lens)
    # Position = tokens computed before + index within the request's run.
    shift = batch.num_computed_tokens_cpu - batch.query_start_loc_cpu[:-1]
    positions = torch.arange(batch.num_tokens) + shift[request]
    request, positions = request.to(block_table.device), positions.to(block_table.device)
    blocks = block_table[request, positions // block_size].to(torch.int64)
    return blocks * block_size + positions % block_size
