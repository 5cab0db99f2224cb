"""Windows and chunks, with prompts of every length: vLLM frees a block as soon as no later token sees it."""

from __future__ import annotations

import random
from itertools import repeat

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SHAPE = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048}
#: Name → family, its window or chunk, and the block size. The last two have no layer that keeps everything.
MODELS = {
    "window 64, block 32": ("gemma3", {"sliding_window": 64}, 32),
    "window 72, block 16": ("gemma3", {"sliding_window": 72}, 16),
    "chunk 64, block 32": ("llama4", {"attention_chunk_size": 64}, 32),
    "window 48, block 32, no other layers": ("mistral", {"sliding_window": 48}, 32),
}
#: From less than a window to more than two, with both sides of each edge of a block.
LENGTHS = range(2, 200)
#: Requests at a time; the pool has room for them.
BATCH = 33


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    return MODELS[request.param]


@pytest.fixture(scope="module", params=["vllm", "reference"])
def running_pair(request, case, start_module_pair, tmp_path_factory):
    from tests.support.tiny_models import write_tiny_model

    family, look_back, block_size = case
    model = write_tiny_model(tmp_path_factory.mktemp("windows"), family, **SHAPE, **look_back)
    return start_module_pair(
        model=model,
        host=request.param,
        block_size=block_size,
        num_gpu_blocks_override=1024,
        max_num_seqs=BATCH,
        max_num_batched_tokens=128,  # so that most prompts are computed in chunks, and beside others
        extra={"lease_s": 60, "connect_timeout_s": 40, "claim_timeout_s": 40},
    )


def _prompts(batch, seed=0):
    return [random.Random(f"{length} {seed}").choices(range(256), k=length) for length in batch]


def _batches():
    return [LENGTHS[first : first + BATCH] for first in range(0, len(LENGTHS), BATCH)]


def _hand_over(pair, offered, prompts):
    answers = pair.answers(pair.prefill, offered, 1, repeat({"do_remote_decode": True}))
    return pair.answers(pair.decode, prompts, 8, [answer["params"] for answer in answers])


@pytest.mark.parametrize("batch", _batches(), ids=lambda batch: f"{batch[0]} to {batch[-1]}")
def test_prompts_of_every_length(pair, batch):
    prompts = _prompts(batch)
    before = pair.decode.order("figures")
    answers = _hand_over(pair, prompts, prompts)
    after = pair.decode.order("figures")
    assert after["num_loads"] - before["num_loads"] == len(prompts)
    assert after["num_failures"] == before["num_failures"]
    pair.assert_all_like_alone(prompts, answers)


@pytest.mark.parametrize("batch", _batches()[-2:], ids=lambda batch: f"{batch[0]} to {batch[-1]}")
class TestWhatIsHere:
    def test_prompts_longer_than_the_offer(self, pair, batch):
        prompts = _prompts(batch, seed=1)
        answers = _hand_over(pair, prompts, [[*prompt, 1, 2, 3] for prompt in prompts])
        pair.assert_all_like_alone([[*prompt, 1, 2, 3] for prompt in prompts], answers)

    def test_prompts_that_both_nodes_know_the_beginning_of(self, pair, batch):
        prompts = _prompts(batch, seed=2)
        for node in (pair.prefill, pair.decode):
            pair.answers(node, [prompt[:100] for prompt in prompts])
        answers = _hand_over(pair, prompts, prompts)
        pair.assert_all_like_alone(prompts, answers)

    def test_prompts_that_were_handed_over_before(self, pair, batch):
        prompts = _prompts(batch, seed=3)
        _hand_over(pair, prompts, prompts)
        answers = _hand_over(pair, prompts, prompts)
        pair.assert_all_like_alone(prompts, answers)
