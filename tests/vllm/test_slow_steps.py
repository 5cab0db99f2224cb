"""Prompts that take seconds to compute do not delay what other nodes wait for."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def large_model(tmp_path_factory):
    """A model so large that a step over 3,800 tokens takes seconds on one core."""
    from tests.support.tiny_models import write_tiny_model

    return write_tiny_model(
        tmp_path_factory.mktemp("model"),
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=8,
        num_attention_heads=8,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.05,
    )


@pytest.fixture(scope="module")
def running_pair(start_module_pair, large_model):
    """Nodes that run one request at a time, each prompt in one step."""
    return start_module_pair(
        model=large_model,
        max_model_len=4000,
        max_num_seqs=1,
        max_num_batched_tokens=4000,
    )


def test_a_handoff_does_not_wait_for_another_prompt(pair, prompt):
    """The step that computes the long prompt begins as soon as the short one's offer is made."""
    first, long = prompt(64), prompt(3800)
    offered, busy, loaded = (next(pair.names) for _ in range(3))
    pair.prefill.start(offered, first, 1, {"do_remote_decode": True})
    pair.prefill.start(busy, long)
    params = pair.prefill.result(offered)["params"]
    answer = pair.decode.ask(loaded, first, 1, params)
    assert not pair.prefill.has_finished(busy)
    assert answer["reason"] == "length"
    pair.prefill.result(busy)
