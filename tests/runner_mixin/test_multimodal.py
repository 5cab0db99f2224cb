"""Embeddings of a multimodal encoder."""

from __future__ import annotations

import pytest
import torch

from kvferry.runner_mixin import (
    gather_mm_placeholders,
    sanity_check_mm_encoder_outputs,
    scatter_mm_placeholders,
)

ROWS = torch.ones(3, 4)


@pytest.mark.parametrize("embeddings", [[ROWS, ROWS[:1]], (ROWS, ROWS), torch.ones(2, 3, 4)])
def test_one_matrix_per_item_is_accepted(embeddings):
    sanity_check_mm_encoder_outputs(embeddings, 2)


def test_anything_else_is_refused():
    with pytest.raises(TypeError, match="got dict"):
        sanity_check_mm_encoder_outputs({0: ROWS}, 1)


@pytest.mark.parametrize("embeddings", [[ROWS[0]], [ROWS.numpy()], torch.ones(1, 4), torch.ones(1, 2, 3, 4)])
def test_an_item_that_is_not_a_matrix_is_named(embeddings):
    with pytest.raises(ValueError, match="item 0 is"):
        sanity_check_mm_encoder_outputs(embeddings, 1)


def test_the_count_must_match():
    with pytest.raises(ValueError, match="got 2 embeddings for 3 items"):
        sanity_check_mm_encoder_outputs([ROWS, ROWS], 3)


def test_scatter_then_gather_is_the_identity():
    embeds = torch.arange(6.0).view(3, 2)
    mask = torch.tensor([False, True, True, False, True])
    placeholders = scatter_mm_placeholders(embeds, mask)
    assert placeholders.shape == (5, 2)
    assert placeholders[~mask].isnan().all()
    assert gather_mm_placeholders(placeholders, mask).equal(embeds)


def test_without_a_mask_nothing_is_moved():
    assert scatter_mm_placeholders(ROWS, None) is ROWS
    assert gather_mm_placeholders(ROWS, None) is ROWS


def test_a_mask_with_another_number_of_placeholders_is_refused():
    with pytest.raises(ValueError, match="cannot scatter 3 embeddings: the mask has 2 placeholders"):
        scatter_mm_placeholders(ROWS, torch.tensor([True, False, True]))


@pytest.mark.parametrize("mask", [torch.tensor([1, 1, 1]), torch.ones(3, 4, dtype=torch.bool)])
def test_a_mask_is_one_bool_per_position(mask):
    for move in (scatter_mm_placeholders, gather_mm_placeholders):
        with pytest.raises(ValueError, match="a mask must be a 1-D bool tensor"):
            move(ROWS, mask)
