"""When the residual is scattered because of sequence parallelism."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.connector.config import CompilationConfig, ParallelConfig
from kvferry.runner_mixin import is_residual_scattered_for_sp


@pytest.fixture
def scattered(config):
    def ask(num_tokens, *, ranks=2, **compilation):
        options = {"enable_sequence_parallelism": True, **compilation}
        return is_residual_scattered_for_sp(
            replace(
                config,
                parallel=ParallelConfig(tensor_parallel_size=ranks),
                compilation=CompilationConfig(**options),
            ),
            num_tokens,
        )

    return ask


def test_not_without_sequence_parallelism(scattered):
    assert not scattered(8, enable_sequence_parallelism=False, full_graph=True)


def test_not_on_one_rank(scattered):
    assert not scattered(7, ranks=1, full_graph=True)


def test_a_number_of_tokens_that_cannot_be_divided_is_refused(scattered):
    with pytest.raises(ValueError, match="multiple of 2 tokens, got 7"):
        scattered(7, full_graph=True)


def test_every_size_of_a_whole_or_partitioned_graph(scattered):
    assert scattered(8, full_graph=True)
    assert scattered(8, use_graph_partition=True)


def test_otherwise_only_the_listed_sizes(scattered):
    assert not scattered(8)
    assert scattered(8, compile_sizes=frozenset({8}))
    assert not scattered(6, compile_sizes=frozenset({8}))
