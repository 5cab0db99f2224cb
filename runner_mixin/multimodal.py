"""Embeddings of a multimodal encoder: check them, spread them over placeholders, and gather them again."""

from __future__ import annotations

import torch


def sanity_check_mm_encoder_outputs(embeddings: object, expected_num_items: int) -> None:
    """Check that an encoder returned one 2-D tensor for each of its items.

    Args:
        embeddings: A list or tuple of `(num_embeds, hidden)` tensors, or one `(num_items, num_embeds,
            hidden)`.
        expected_num_items: Number of images, audio clips and so on that the encoder was given.

    Raises:
        TypeError: `embeddings` has another type.
        ValueError: there is not one 2-D tensor per item.
    """
    wanted = "a list or tuple of 2-D tensors, or one 3-D tensor"
    if not isinstance(embeddings, (list, tuple, torch.Tensor)):
        raise TypeError(f"a multimodal encoder must return {wanted}, got {type(embeddings).__name__}")
    if len(embeddings) != expected_num_items:
        raise ValueError(
            f"a multimodal encoder must return one embedding per item, got {len(embeddings)} embeddings for "
            f"{expected_num_items} items"
        )
    for index, item in enumerate(embeddings):
        if not isinstance(item, torch.Tensor) or item.ndim != 2:
            got = tuple(item.shape) if isinstance(item, torch.Tensor) else type(item).__name__
            raise ValueError(f"a multimodal encoder must return {wanted}; item {index} is {got}")


def scatter_mm_placeholders(embeds: torch.Tensor, is_embed: torch.Tensor | None) -> torch.Tensor:
    """Spread embeddings over the placeholders that take one.

    Args:
        embeds: `(num_embeds, hidden)`.
        is_embed: `(num_placeholders,)` bool with `num_embeds` true entries, or None if every placeholder
            takes one.

    Returns:
        `(num_placeholders, hidden)`, NaN where there is no embedding; `embeds` itself if `is_embed` is None.

    Raises:
        ValueError: the mask is not a 1-D bool tensor, or the number of true entries is not the number of
            embeddings.
    """
    if is_embed is None:
        return embeds
    _require_mask(is_embed)
    wanted = int(is_embed.sum())
    if wanted != embeds.shape[0]:
        raise ValueError(
            f"cannot scatter {embeds.shape[0]} embeddings: the mask has {wanted} placeholders that take one"
        )
    placeholders = embeds.new_full((is_embed.shape[0], embeds.shape[-1]), float("nan"))
    placeholders[is_embed] = embeds
    return placeholders


def gather_mm_placeholders(placeholders: torch.Tensor, is_embed: torch.Tensor | None) -> torch.Tensor:
    """Select the embeddings; the inverse of `scatter_mm_placeholders`.

    Args:
        placeholders: `(num_placeholders, hidden)`.
        is_embed: `(num_placeholders,)` bool, or None if every placeholder has an embedding.

    Returns:
        `(num_embeds, hidden)`; `placeholders` itself if `is_embed` is None.

    Raises:
        ValueError: the mask is not a 1-D bool tensor, or its length is not the number of placeholders.
    """
    if is_embed is None:
        return placeholders
    _require_mask(is_embed)
    if is_embed.shape[0] != placeholders.shape[0]:
        raise ValueError(
            f"cannot gather from {placeholders.shape[0]} placeholders: the mask has {is_embed.shape[0]} entries"
        )
    return placeholders[is_embed]


def _require_mask(is_embed: torch.Tensor) -> None:
    if is_embed.dtype is not torch.bool or is_embed.ndim != 1:
        raise ValueError(f"a mask must be a 1-D bool tensor, got {tuple(is_embed.shape)} {is_embed.dtype}")
