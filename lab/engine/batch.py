"""The persistent batch, which the runner keeps from step to step, and the tensors of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...runner_mixin.attention.metadata import StepBatch, compute_slot_mapping
from .sampling import TokenSampler
from .step import ScheduledRequest, StepPlan


@dataclass(frozen=True)
class StepInputs:
    """One step's tensors, on the device. Tokens lie request after request.

    Attributes:
        input_ids: `(1, num_tokens)` int64.
        position_ids: `(1, num_tokens)` int64.
        block_tables: Per KV cache group, `(num_requests, max_blocks)` int32.
        slot_mappings: Per KV cache group, `(num_tokens,)` int64.
        logits_indices: `(num_samples,)` int64: the tokens after which one is sampled.
        samplers: `(num_samples,)`.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    batch: StepBatch
    block_tables: list[torch.Tensor]
    slot_mappings: list[torch.Tensor]
    logits_indices: torch.Tensor
    samplers: list[TokenSampler]


class InputBatch:
    """Keep tokens and block table of each running request in a row, so that a step copies only what is new.

    Args:
        max_num_seqs: Rows.
        max_model_len: Longest sequence.
        block_sizes: Tokens per block, by KV cache group.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_sizes: Sequence[int], device: torch.device
    ) -> None:
        self._block_sizes = tuple(block_sizes)
        self._device = device
        self._tokens = np.zeros((max_num_seqs, max_model_len), dtype=np.int64)
        self._num_tokens = [0] * max_num_seqs
        self._tables = [
            np.zeros((max_num_seqs, -(-max_model_len // size)), dtype=np.int32) for size in block_sizes
        ]
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(max_num_seqs))
        self._samplers: dict[str, TokenSampler] = {}

    def forget(self, plan: StepPlan) -> None:
        """Drop the requests that finished or lost their blocks.

        Call this in every step, even if it computes nothing.
        """
        for request_id in plan.finished_req_ids | plan.preempted_req_ids:
            row = self._rows.pop(request_id, None)
            if row is not None:
                self._free_rows.append(row)
        for request_id in plan.finished_req_ids:
            # Keep the sampler over a preemption, so that a seeded request continues with its own random
            # numbers.
            self._samplers.pop(request_id, None)

    def make_inputs(self, plan: StepPlan) -> StepInputs:
        """Make the tensors of a step that computes something."""
        rows = [self._sync_row(item) for item in plan.scheduled_requests]
        starts = [item.num_computed_tokens for item in plan.scheduled_requests]
        counts = [item.num_scheduled_tokens for item in plan.scheduled_requests]
        batch = StepBatch.from_lens(counts, starts, self._device)
        tables = [self._device_table(group, rows, batch.max_seq_len) for group in range(len(self._tables))]
        runs = list(zip(rows, starts, counts, strict=True))
        ends = np.cumsum(counts) - 1
        samples = [index for index, item in enumerate(plan.scheduled_requests) if item.yields_token]
        return StepInputs(
            input_ids=self._to_device([self._tokens[row, at : at + count] for row, at, count in runs]),
            position_ids=self._to_device([np.arange(at, at + count) for _, at, count in runs]),
            batch=batch,
            block_tables=tables,
            slot_mappings=[
                compute_slot_mapping(table, batch, size)
                for table, size in zip(tables, self._block_sizes, strict=True)
            ],
            logits_indices=torch.from_numpy(ends[samples]).to(self._device),
            samplers=[self._sampler(plan.scheduled_requests[index]) for index in samples],
        )

    def make_dummy_inputs(self, num_tokens: int) -> StepInputs:
        """Make a step over `num_tokens` tokens of no request, at most one block.

        It writes to the null block and samples nothing.
        """
        batch = StepBatch.from_lens([num_tokens], [0], self._device)
        tables = [torch.zeros((1, 1), dtype=torch.int32, device=self._device) for _ in self._tables]
        positions = self._to_device([np.arange(num_tokens)])
        slots = [torch.arange(num_tokens, device=self._device) for _ in tables]
        last = torch.tensor([num_tokens - 1], device=self._device)
        return StepInputs(torch.zeros_like(positions), positions, batch, tables, slots, last, [])

    def _to_device(self, runs: list[npt.NDArray[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(runs)).unsqueeze(0).to(self._device)

    def _device_table(self, group: int, rows: list[int], max_seq_len: int) -> torch.Tensor:
        num_columns = -(-max_seq_len // self._block_sizes[group])
        return torch.from_numpy(self._tables[group][rows, :num_columns]).to(self._device)

    def _sync_row(self, item: ScheduledRequest) -> int:
        """Bring a request's row up to date: new tokens, and its block table, in which blocks may have slid
        out.
        """
        request_id = item.request_id
        if request_id not in self._rows:
            self._rows[request_id] = row = self._free_rows.pop()
            self._num_tokens[row] = 0
        row = self._rows[request_id]
        known, tokens = self._num_tokens[row], item.request.all_token_ids
        self._tokens[row, known : len(tokens)] = tokens[known:]
        self._num_tokens[row] = len(tokens)
        for table, block_ids in zip(self._tables, item.block_ids, strict=True):
            table[row, : len(block_ids)] = block_ids
        return row

    def _sampler(self, item: ScheduledRequest) -> TokenSampler:
        request = item.request
        if request.request_id not in self._samplers:
            num_known = len(request.source.known_token_ids)
            self._samplers[request.request_id] = TokenSampler(request.source.sampling, num_known)
        return self._samplers[request.request_id]
