"""Kinds of models and of nodes: each row of a table is two real engines, which answer like one node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import pytest
import torch

from kvferry.lab.demo.near_tie import tolerance_of

from .conftest import Pair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SIZE = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048}
#: Most drafts are wrong, so their slots are computed again.
GUESSES = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
# Ranks busy-poll while they wait for each other, so on shared cores their signs of life can be late.
PATIENCE = {"lease_s": 60, "connect_timeout_s": 40, "claim_timeout_s": 40}
#: With prefix caching vLLM 0.32 keeps a state for each block, and its kernels for CPUs fail.
STATES = {"enable_prefix_caching": False, "max_num_batched_tokens": 128}
#: vLLM's CPU kernel knows only the latent of the large models in DeepSeek-V2's form, 512 + 64.
LATENT = {
    "model_type": "deepseek_v2",
    "hidden_size": 128,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 3,  # no experts
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
}
NUM_LAYERS = 3
#: Of a token's latent in all layers, for float32.
LATENT_BYTES = NUM_LAYERS * 4 * (512 + 64)
# The other backend for CPUs needs AMX, and has no float32.
ON_CPU = {"attention_backend": "CPU_MLA"}


def _ranks(tensor: int, stages: int = 1) -> dict[str, Any]:
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    # vLLM's runner for CPUs makes the buffer between stages while it warms up, and it does so only if it may
    # compile.
    return {**sizes, "distributed_executor_backend": "mp", "enforce_eager": stages == 1}


@dataclass(frozen=True)
class Kind:
    """Two nodes of one kind.

    Attributes:
        family, shape: Of the model; see `write_tiny_model`.
        settings: vLLM's, of both nodes.
        prefill, decode: Further settings of one node. Then each node is also the other one's peer.
        lengths: Of prompts, in tokens.
        keeps_states: Of a request that has an answer nothing can be handed over.
        tolerance: How far log probabilities may be from the node's own, with random weights, where kernels
            for prompts and for single tokens differ by more than a near-tie. 0: they do not.
        token_bytes: What a load moves per token. 0: not compared.
    """

    family: str = "llama"
    shape: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    prefill: Mapping[str, Any] = field(default_factory=dict)
    decode: Mapping[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (5, 33, 400)
    keeps_states: bool = False
    tolerance: float = 0.0
    token_bytes: int = 0

    def ways(self, pair: Pair) -> Iterator[Pair]:
        yield pair
        if self.prefill != self.decode:
            yield Pair(pair.decode, pair.prefill, pair.names)

    def assert_handed_over(self, pair: Pair, tokens: list[int]) -> None:
        """Hand a prompt over, and compare the answer with the decode node's own."""
        # A node's own answer after its first token goes on with the same kernel as the handoff.
        alone = pair.alone(tokens, 9) if self.tolerance else None
        asked = tokens if alone is None else [*tokens, *alone["tokens"][:1]]
        pair.decode.order("forget")
        before = pair.decode.order("figures")
        params = pair.prefilled(asked)
        if self.keeps_states:
            assert params["remote_num_tokens"] == len(asked) - 1
        answer = pair.decode.ask(next(pair.names), asked, 8, params)
        after = pair.decode.order("figures")
        assert answer["reason"] == "length"
        assert after["num_loads"] > before["num_loads"]  # each rank counts its own
        if self.token_bytes:
            assert after["num_bytes"] - before["num_bytes"] == len(asked) * self.token_bytes
        if alone is None:
            pair.assert_like_alone(tokens, answer)
        else:
            assert answer["tokens"] == alone["tokens"][1:]
            assert answer["logprobs"] == pytest.approx(alone["logprobs"][1:], abs=self.tolerance)


KINDS = {
    "chunks and guesses": Kind(
        shape=SIZE,
        settings={"max_num_batched_tokens": 128, "speculative_config": GUESSES},
        lengths=(5, 128, 500),
    ),
    # Each rank reads the heads and layers that it keeps from the ranks that keep them.
    "two ranks each": Kind(shape=SIZE, settings=_ranks(2)),
    "two ranks and one, two KV heads": Kind(shape={**SIZE, "num_key_value_heads": 2}, prefill=_ranks(2)),
    "two ranks and one, one KV head": Kind(shape={**SIZE, "num_key_value_heads": 1}, prefill=_ranks(2)),
    "four ranks and two, four KV heads": Kind(
        shape={**SIZE, "num_key_value_heads": 4}, prefill=_ranks(4), decode=_ranks(2)
    ),
    "two stages and one": Kind(shape=SIZE, prefill=_ranks(1, 2)),
    "two stages and two ranks": Kind(shape=SIZE, prefill=_ranks(1, 2), decode=_ranks(2)),
    # vLLM's CPU attention needs heads of 32 elements.
    "attention and states": Kind(
        "granitemoehybrid", {**SIZE, "mamba_d_head": 32}, STATES, lengths=(2, 33, 64, 400), keeps_states=True
    ),
    "attention and states in each layer": Kind(
        "falcon_h1", {**SIZE, "mamba_d_head": 32, "mamba_d_ssm": 128}, STATES, keeps_states=True
    ),
    "nothing but states": Kind("mamba2", {"intermediate_size": 128}, STATES, keeps_states=True),
    # vLLM keeps a state for the last token of each block then, in a table with one column per block.
    "states with prefix caching": Kind(
        "qwen3_next",
        {
            **SIZE,
            "hidden_size": 256,
            "head_dim": 64,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
        {"dtype": "bfloat16"},
        lengths=(33, 288, 700),
        tolerance=tolerance_of("bfloat16"),
    ),
    # Latents are not packed, so a block of one node is read in the parts in which the other node keeps them.
    "latents in blocks of two sizes": Kind(
        shape=LATENT,
        settings=ON_CPU,
        prefill={"block_size": 16},
        decode={"pages_of": 48},
        tolerance=0.2,
        token_bytes=LATENT_BYTES,
    ),
}
NEEDS_BF16 = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="vLLM's kernels for gated delta nets need AVX-512 BF16"
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[NEEDS_BF16] * (name == "states with prefix caching")) for name in KINDS
    ],
)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def running_pair(kind, pair_of, tmp_path_factory):
    from tests.support.tiny_models import write_tiny_model

    shape = {"max_position_embeddings": 2048, **kind.shape}
    model = write_tiny_model(tmp_path_factory.mktemp("model"), kind.family, **shape)
    own = {"prefill": kind.prefill, "decode": kind.decode}
    with pair_of(model=model, extra=PATIENCE, **own, **kind.settings) as pair:
        yield pair


def test_answers_are_those_of_one_node(kind, pair, prompt):
    for way in kind.ways(pair):
        for num_tokens in kind.lengths:
            kind.assert_handed_over(way, prompt(num_tokens))


@pytest.mark.parametrize("cached", ["prefill", "decode", "both"])
def test_answers_with_a_prefix_that_is_already_cached(kind, pair, prompt, cached):
    """First a beginning of the prompt is in the caches, and then all of it."""
    tokens = prompt(600)
    alone = pair.alone(tokens, 9)
    asked = [*tokens, alone["tokens"][0]]
    tolerance = kind.tolerance or tolerance_of("float32")
    for known in (tokens[:400], asked):
        for name, node in (("prefill", pair.prefill), ("decode", pair.decode)):
            node.order("forget")
            if cached in (name, "both"):
                node.ask(next(pair.names), known)
        answer = pair.hand_over(asked)
        assert answer["tokens"] == alone["tokens"][1:]
        assert answer["logprobs"] == pytest.approx(alone["logprobs"][1:], abs=tolerance)


def test_a_prompt_longer_than_the_offer_is_continued(kind, pair, prompt):
    if kind.tolerance:
        pytest.skip("its kernels' answers are compared from the second token on")
    tokens = prompt(300)
    params = pair.prefilled(tokens[:200])
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.assert_like_alone(tokens, answer)


def test_drafts_that_are_accepted(kind, pair):
    if "speculative_config" not in kind.settings:
        pytest.skip("it drafts nothing")
    tokens = [1, 2, 3, 4] * 40
    answer = pair.hand_over(tokens, max_tokens=40)
    pair.assert_like_alone(tokens, answer, max_tokens=40)


def test_an_offer_that_was_already_read(kind, pair, prompt, policy):
    """With several groups, vLLM is told about the failed request, and not about single blocks."""
    tokens = prompt(200)
    params = pair.prefilled(tokens)
    pair.decode.ask(next(pair.names), tokens, 8, params)
    pair.decode.order("forget")
    answer = pair.decode.ask(next(pair.names), tokens, 8, params)
    assert answer["reason"] == ("error" if policy == "fail" else "length")
    if not kind.tolerance:
        pair.assert_ended_by(policy, answer, tokens)


@pytest.mark.parametrize("lengths", [range(2, 35), range(123, 133)], ids=lambda lengths: f"{lengths[0]} on")
def test_states_of_prompts_of_every_length(kind, pair, prompt, lengths):
    """Across the end of a block, and of a chunk of a prompt; the pool has room for all of them."""
    if not kind.keeps_states:
        pytest.skip("test_windows.py has every length")
    prompts = [prompt(length, seed=1) for length in lengths]
    before = pair.decode.order("figures")["num_loads"]
    offers = pair.answers(pair.prefill, prompts, 1, repeat({"do_remote_decode": True}))
    answers = pair.answers(pair.decode, prompts, 8, [offer["params"] for offer in offers])
    assert pair.decode.order("figures")["num_loads"] - before == len(prompts)
    pair.assert_all_like_alone(prompts, answers)


def test_an_answer_of_several_tokens_is_right_and_its_state_is_not_offered(kind, pair, prompt):
    """The state is past the prompt by then, and no node could continue it."""
    if not kind.keeps_states:
        pytest.skip("it keeps no state")
    tokens = prompt(50)
    answer = pair.prefill.ask(next(pair.names), tokens, 8, {"do_remote_decode": True})
    assert answer["params"] is None
    pair.assert_like_alone(tokens, answer)


class TestLatentsOfUnlikeRanks:
    """Each rank keeps the whole latent, so a rank reads it from one rank of the other node.

    On a CPU vLLM itself answers differently with one rank and with two, so the caches are compared and not
    the answers.
    """

    @pytest.fixture(scope="class")
    @classmethod
    def running_pair(cls, pair_of, tmp_path_factory):
        from tests.support.tiny_models import write_tiny_model

        model = write_tiny_model(tmp_path_factory.mktemp("latent"), **LATENT)
        with pair_of(prefill=_ranks(2), model=model, extra=PATIENCE, **ON_CPU) as pair:
            yield pair

    def test_the_caches_are_equal_and_each_rank_reads_its_own_once(self, pair, prompt):
        for seed, way in enumerate((pair, Pair(pair.decode, pair.prefill, pair.names))):
            self._assert_equal_caches(way, prompt(400, seed))

    @staticmethod
    def _assert_equal_caches(pair, tokens):
        params = pair.prefilled(tokens)
        name, before = next(pair.names), pair.decode.order("figures")
        pair.decode.start(name, tokens, 1000, params)
        pair.decode.wait_for_first_token(name)
        # The decode node writes the prompt's last token and its answer itself, so the last block may differ.
        (offered,), ours = params["remote_block_ids"], pair.decode.order("blocks", request=name)["blocks"]
        num_whole = len(offered) - 1
        theirs, loaded = (
            node.order("digests", blocks=blocks[:num_whole])["digests"]
            for node, blocks in ((pair.prefill, offered), (pair.decode, ours))
        )
        pair.decode.order("abort", request=name)
        assert num_whole > 20
        assert len(loaded[0]) == NUM_LAYERS
        assert all(rank == theirs[0] for rank in (*theirs, *loaded))
        num_bytes = pair.decode.order("figures")["num_bytes"] - before["num_bytes"]
        assert num_bytes == len(loaded) * len(tokens) * LATENT_BYTES
