"""Parts of a prompt that are vectors rather than tokens, such as the output of an encoder for an image or a sound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ...runner_mixin.multimodal import gather_mm_placeholders, scatter_mm_placeholders
from .errors import InvalidRequestError
from .step import StepPlan
from .types import GenerationRequest, PromptItem

_ELEMENT_BYTES = 4


def check_items(source: GenerationRequest, hidden_size: int) -> None:
    """Check that the items of a request fit its prompt and the model.

    Raises:
        InvalidRequestError: an item is outside the prompt, overlaps the item before it, has more or fewer vectors than
            places for them, or has a value that is not finite.
    """
    end = 0
    for index, item in enumerate(source.items):
        where = f"item {index} of the prompt"
        if item.length < 1 or item.offset < end or item.offset + item.length > len(source.prompt_token_ids):
            raise _refusal(
                f"{where} has tokens {item.offset} to {item.offset + item.length}: they must lie between {end} and "
                f"{len(source.prompt_token_ids)}, inside the prompt and after the items before it"
            )
        if item.is_embed and len(item.is_embed) != item.length:
            raise _refusal(f"{where} has {item.length} tokens, but is_embed has {len(item.is_embed)} entries")
        num_vectors = sum(item.is_embed) if item.is_embed else item.length
        if len(item.vectors) != num_vectors * hidden_size * _ELEMENT_BYTES:
            raise _refusal(
                f"{where} has {len(item.vectors)} bytes: {num_vectors} vectors of {hidden_size} float32 values need "
                f"{num_vectors * hidden_size * _ELEMENT_BYTES}"
            )
        if not np.isfinite(np.frombuffer(item.vectors, "<f4")).all():
            raise _refusal(f"{where} has vectors with values that are not finite")
        end = item.offset + item.length


def embed_step(plan: StepPlan, input_ids: torch.Tensor, embedding: torch.nn.Module) -> torch.Tensor | None:
    """Make a step's input vectors. None if the step has tokens only.

    Args:
        input_ids: `(1, num_tokens)`, the tokens of all requests one after the other.
        embedding: The model's embedding of tokens.

    Returns:
        `(1, num_tokens, hidden_size)`.
    """
    parts = list(_parts(plan))
    if not parts:
        return None
    embedded: torch.Tensor = embedding(input_ids)
    for part in parts:
        vectors, is_embed = part.tensors(embedded.shape[-1])
        rows = torch.arange(part.row, part.row + part.end - part.first)
        rows = rows if is_embed is None else rows[is_embed]
        embedded[0, rows.to(embedded.device)] = vectors.to(embedded)
    return embedded


@dataclass(frozen=True)
class _Part:
    """The placeholders `[first, end)` of an item that a step computes. The first is row `row` of the step's input."""

    item: PromptItem
    first: int
    end: int
    row: int

    def tensors(self, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the vectors of these placeholders, and which placeholders take a vector; None means all."""
        is_embed = torch.tensor(self.item.is_embed) if self.item.is_embed else None
        vectors = torch.from_numpy(np.frombuffer(self.item.vectors, "<f4").reshape(-1, hidden_size).copy())
        part = slice(self.first, self.end)
        placeholders = scatter_mm_placeholders(vectors, is_embed)[part]
        mask = None if is_embed is None else is_embed[part]
        return gather_mm_placeholders(placeholders, mask), mask


def _parts(plan: StepPlan) -> Iterator[_Part]:
    start = 0
    for scheduled in plan.scheduled_requests:
        computed = scheduled.num_computed_tokens
        for item in scheduled.request.source.items:
            first = max(item.offset, computed)
            end = min(item.offset + item.length, computed + scheduled.num_scheduled_tokens)
            if first < end:
                yield _Part(item, first - item.offset, end - item.offset, start + first - computed)
        start += scheduled.num_scheduled_tokens


def _refusal(why: str) -> InvalidRequestError:
    return InvalidRequestError(why, param="prompt_items")
