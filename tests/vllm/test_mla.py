"""Latent attention (MLA), with a small random model in the form of DeepSeek-V2."""

from __future__ import annotations

from typing import ClassVar

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: vLLM's CPU kernel knows only the latent of the large ones, 512 + 64.
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

#: Of a token's latent in one layer, for float32.
TOKEN_BYTES = 4 * (512 + 64)
NUM_LAYERS = 3


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory):
    from tests.support.tiny_models import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("latent"), **LATENT)


@pytest.fixture(scope="module")
def running_pair(start_module_pair, latent_model):
    # The other backend for CPUs needs AMX, and has no float32.
    return start_module_pair(model=latent_model, attention_backend="CPU_MLA")


@pytest.mark.parametrize("num_tokens", [5, 33, 400])
def test_tokens_equal_those_of_one_node(pair, prompt, num_tokens):
    """The prompt ends with the node's own first token, so that its own answer goes on with the same kernel as
    the handoff.

    vLLM's CPU kernels for prompts and for single tokens differ by more than a near-tie with random weights.
    The one for prompts even depends on the prompt's length: a node's own answer to a prompt of 6 tokens is
    not what it says after one of 5. So log probabilities are compared roughly here, and caches exactly below.
    """
    tokens = prompt(num_tokens)
    alone = pair.alone(tokens, 9)
    answer = pair.hand_over([*tokens, alone["tokens"][0]])
    assert answer["reason"] == "length"
    assert answer["tokens"] == alone["tokens"][1:]
    assert answer["logprobs"] == pytest.approx(alone["logprobs"][1:], abs=0.2)


class TestOtherBlockSizes:
    """Latents are not packed, so a block of one node is read in the parts in which the other node
    keeps them.
    """

    @pytest.fixture(scope="class")
    @classmethod
    def nodes(cls, start_module_pair, latent_model):
        sizes = {"prefill": {"block_size": 16}, "decode": {"pages_of": 48}}
        return start_module_pair(**sizes, model=latent_model, attention_backend="CPU_MLA")

    @pytest.fixture(scope="class", params=[(16, 48), (48, 16)], ids=["small to large", "large to small"])
    @classmethod
    def running_pair(cls, request, nodes):
        return nodes if request.param == (16, 48) else type(nodes)(nodes.decode, nodes.prefill, nodes.names)

    @pytest.mark.parametrize("num_tokens", [5, 33, 400])
    def test_tokens_equal_those_of_one_node_and_each_was_read_once(self, pair, prompt, num_tokens):
        tokens = prompt(num_tokens)
        alone = pair.alone(tokens, 9)
        before = pair.decode.order("figures")["num_bytes"]
        answer = pair.hand_over([*tokens, alone["tokens"][0]])
        assert answer["tokens"] == alone["tokens"][1:]
        num_bytes = pair.decode.order("figures")["num_bytes"] - before
        assert num_bytes == (num_tokens + 1) * TOKEN_BYTES * NUM_LAYERS


class TestUnlikeRanks:
    """Each rank keeps the whole latent, so a rank reads it from one rank of the other node.

    On a CPU vLLM itself answers differently with one rank and with two, so the caches are compared and not
    the answers.
    """

    #: Ranks busy-poll while they wait for each other, so on shared cores their signs of life can be late.
    PATIENCE: ClassVar = {"lease_s": 60, "connect_timeout_s": 40, "claim_timeout_s": 40}

    @pytest.fixture(scope="class")
    @classmethod
    def nodes(cls, start_module_pair, latent_model):
        two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
        common = {"model": latent_model, "attention_backend": "CPU_MLA", "extra": cls.PATIENCE}
        return start_module_pair(prefill=two, **common)

    @pytest.fixture(scope="class", params=[(2, 1), (1, 2)], ids=["two ranks to one", "one rank to two"])
    @classmethod
    def running_pair(cls, request, nodes):
        return nodes if request.param == (2, 1) else type(nodes)(nodes.decode, nodes.prefill, nodes.names)

    def test_the_caches_are_equal_and_each_rank_reads_its_own_once(self, pair, prompt):
        tokens = prompt(400)
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
        assert num_bytes == len(loaded) * len(tokens) * TOKEN_BYTES * NUM_LAYERS
