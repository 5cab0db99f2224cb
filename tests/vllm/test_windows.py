"""Windows and chunks, with prompts of every length: vLLM frees a block as soon as no later token sees it."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest

from kvferry.connector.p2p.params import draw_offer_name, rendezvous_params

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SHAPE = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 2048}
#: Drafts of tokens that followed the same token before. Most are wrong, so their slots are computed again.
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
#: Name → family, what its configuration has, and more settings of vLLM.
MODELS = {
    "window 72": ("gemma3", {"sliding_window": 72}, {}),
    "window 40": ("gemma2", {"sliding_window": 40, "tie_word_embeddings": True}, {}),
    "window 56, other heads": ("gemma4", {"sliding_window": 56}, {}),
    "window 48, no other layers": ("mistral", {"sliding_window": 48}, {}),
    "chunk 96": ("llama4", {"attention_chunk_size": 96}, {}),
    "window 64, drafts": ("gemma3", {"sliding_window": 64}, {"speculative_config": DRAFTS}),
    "chunk 64, drafts": ("llama4", {"attention_chunk_size": 64}, {"speculative_config": DRAFTS}),
}
#: From less than a window to more than two, with both sides of each edge of a block.
LENGTHS = range(2, 200)
#: Requests at a time; the pool has room for them.
BATCH = 33


@pytest.fixture(scope="module", params=MODELS)
def running_pair(request, pair_of, tmp_path_factory):
    from tests.support.tiny_models import scale_tensor, write_tiny_model

    family, look_back, more = MODELS[request.param]
    model = write_tiny_model(tmp_path_factory.mktemp("windows"), family, **SHAPE, **look_back)
    if look_back.get("tie_word_embeddings"):  # otherwise each token would repeat itself, whatever it sees
        scale_tensor(model, "model.embed_tokens.weight", 0.3)
    with pair_of(
        model=model,
        num_gpu_blocks_override=1024,
        max_num_seqs=BATCH,
        max_num_batched_tokens=128,  # so that most prompts are computed in chunks, and beside others
        extra={"lease_s": 60, "connect_timeout_s": 40, "claim_timeout_s": 40},
        **more,
    ) as pair:
        yield pair


def _prompts(batch, seed=0):
    return [random.Random(f"{length} {seed}").choices(range(256), k=length) for length in batch]


def _batches():
    return [LENGTHS[first : first + BATCH] for first in range(0, len(LENGTHS), BATCH)]


def _hand_over(pair, offered, prompts):
    """Return the decode node's answers to prompts, the beginnings of which the prefill node has computed."""
    wishes = [{"do_remote_decode": True} for _ in offered]
    offers = [answer["params"] for answer in pair.answers(pair.prefill, offered, 1, wishes)]
    return pair.answers(pair.decode, prompts, 8, offers)


def _hand_over_at_once(pair, prompts):
    """The same, with both nodes asked at once: the decode node loads what the prefill node has computed so
    far.
    """
    offer = pair.prefilled([7] * 40)  # says where the prefill node is
    names = [(next(pair.names), next(pair.names)) for _ in prompts]
    for tokens, (here, there) in zip(prompts, names, strict=True):
        name = draw_offer_name()
        claim = rendezvous_params(name, offer)
        pair.decode.start(there, tokens, 8, claim)
        pair.prefill.start(here, tokens, 1, {"do_remote_decode": True, "rendezvous": name})
    answers = [pair.decode.result(there) for _, there in names]
    for here, _ in names:
        pair.prefill.result(here)
    release = {**offer, "do_remote_prefill": False, "do_release": True}
    pair.prefill.ask(next(pair.names), [3], params=release)
    return answers


@contextmanager
def _loading(node, prompts):
    """Fail unless the node loads what is offered for each of these prompts."""
    before = node.order("figures")
    yield
    after = node.order("figures")
    assert after["num_loads"] - before["num_loads"] == len(prompts)
    assert after["num_failures"] == before["num_failures"]


@pytest.mark.parametrize("batch", _batches(), ids=lambda batch: f"{batch[0]} to {batch[-1]}")
def test_prompts_of_every_length(pair, batch):
    prompts = _prompts(batch)
    with _loading(pair.decode, prompts):
        answers = _hand_over(pair, prompts, prompts)
    pair.assert_all_like_alone(prompts, answers)


@pytest.mark.parametrize("batch", _batches()[-1:], ids=lambda batch: f"{batch[0]} to {batch[-1]}")
class TestOtherWays:
    """Each length of a prompt of several chunks, up to a whole block."""

    def test_prompts_that_both_nodes_get_at_once(self, pair, batch):
        prompts = _prompts(batch, seed=4)
        with _loading(pair.decode, prompts):
            answers = _hand_over_at_once(pair, prompts)
        pair.assert_all_like_alone(prompts, answers)

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

    def test_prompts_that_were_preempted_before_they_are_offered(self, pair, batch):
        """A prompt that loses its blocks is computed in others, and those of its windows are held then."""
        prompts = _prompts(batch, seed=5)
        names = [next(pair.names) for _ in prompts]
        before = pair.prefill.order("figures")["num_preemptions"]
        for name, tokens in zip(names, prompts, strict=True):
            pair.prefill.start(name, tokens, 8, {"do_remote_decode": True})
        pair.prefill.wait_for_status(lambda status: status["used_blocks"] > 0)
        pair.prefill.order("preempt")
        offers = [pair.prefill.result(name)["params"] for name in names]
        assert pair.prefill.order("figures")["num_preemptions"] > before  # it comes with a later step
        answers = pair.answers(pair.decode, prompts, 8, offers)
        pair.assert_all_like_alone(prompts, answers)

    def test_prompts_that_were_handed_over_before(self, pair, batch):
        prompts = _prompts(batch, seed=3)
        _hand_over(pair, prompts, prompts)
        answers = _hand_over(pair, prompts, prompts)
        pair.assert_all_like_alone(prompts, answers)


class TestASmallPool:
    @pytest.fixture(scope="class")
    @classmethod
    def running_pair(cls, pair_of, tmp_path_factory):
        from tests.support.tiny_models import write_tiny_model

        model = write_tiny_model(tmp_path_factory.mktemp("windows"), "gemma3", **SHAPE, sliding_window=64)
        with pair_of(
            model=model,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            decode={"num_gpu_blocks_override": 90},
            extra={"rendezvous_wait_s": 4},
        ) as pair:
            yield pair

    def test_loads_that_fail_together_do_not_wait_for_each_other(self, pair, prompt):
        """Each holds what it was to load.

        To compute its prompt it needs more: blocks of the windows that it would not load.
        """
        pair.decode.order("policy", policy="recompute")
        where = pair.prefilled([7] * 40)
        release = {**where, "do_remote_prefill": False, "do_release": True}
        pair.prefill.ask(next(pair.names), [3], params=release)
        prompts = [prompt(400, seed) for seed in range(10)]
        # Nothing answers to these names, so all loads fail at the same time.
        claims = [rendezvous_params(draw_offer_name(), where) for _ in prompts]
        answers = pair.answers(pair.decode, prompts, 8, claims)
        assert pair.decode.metric("kvferry_rendezvous_failures_total") >= 5
        pair.assert_all_like_alone(prompts, answers)
