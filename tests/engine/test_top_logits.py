"""A node reports the most likely tokens after a prompt, which distinguishes a near-tie from a wrong answer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.lab.demo.near_tie import Expectation, compare
from kvferry.lab.engine.parallel.codec import decode, encode
from kvferry.lab.engine.weights import load_model
from kvferry.runner_mixin.outputs import ModelRunnerOutput

PROMPT = [(7919 * index) % 251 for index in range(40)]


def _ask(node: Any) -> Callable[[str | Sequence[int], int], Expectation]:
    def ask(prompt: str | Sequence[int], max_tokens: int) -> Expectation:
        assert not isinstance(prompt, str)
        tokens = node.answer(prompt, max_tokens=max_tokens, num_top_logits=2)
        told = node.last(list(node.outputs)[-1]).next_token
        return Expectation(told.prompt_token_ids, tokens, told.top_logits)

    return ask


def test_they_are_the_models_logits_for_the_first_token(make_node: Any, tiny_model: Any) -> None:
    node = make_node()
    first, *_ = node.answer(PROMPT, max_tokens=3, num_top_logits=5)
    told = node.last("q0").next_token
    assert told.prompt_token_ids == tuple(PROMPT)
    model = load_model(tiny_model("llama"), torch.float32, torch.device("cpu"), "eager")
    with torch.inference_mode():
        largest = model(torch.tensor([PROMPT])).logits[0, -1].topk(5)
    assert [token for token, _ in told.top_logits] == largest.indices.tolist()
    assert told.top_logits[0][0] == first
    assert [logit for _, logit in told.top_logits] == pytest.approx(largest.values.tolist(), abs=1e-3)


def test_each_request_that_asks_for_them_gets_its_own(make_node: Any) -> None:
    node = make_node()
    prompts = {"a": PROMPT[:20], "b": PROMPT[20:], "c": PROMPT}
    for name, prompt in prompts.items():
        node.add(name, prompt, max_tokens=2, num_top_logits=0 if name == "b" else 1)
    node.run()
    assert node.last("b").next_token is None
    for name in ("a", "c"):
        told = node.last(name).next_token
        assert told.prompt_token_ids == tuple(prompts[name])
        assert [token for token, _ in told.top_logits] == node.tokens(name)[:1]


def test_worker_processes_report_them_too() -> None:
    output = ModelRunnerOutput(
        ("a",),
        ((3,),),
        top_logits={"a": ((3, 1.5), (4, 1.25))},
        logprobs={"a": ((3, -0.5), (3, -0.5))},
    )
    assert decode(encode(output)) == output


def test_a_model_with_twin_tokens_ties_at_each_of_them(
    make_node: Any, tiny_model: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_model("llama"), tmp_path / "twins"))
    likely = make_node().answer(PROMPT, max_tokens=1)[0]
    twin = 255 if likely != 255 else 254
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][twin] = tensors["lm_head.weight"][likely]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    node = make_node(model=str(folder))
    ask = _ask(node)
    expected = ask(PROMPT, 6)
    assert {token for token, _ in expected.top_logits} == {likely, twin}
    assert expected.top_logits[0][1] == expected.top_logits[1][1]
    other = twin if expected.token_ids[0] == likely else likely
    answer = [other, *ask([*PROMPT, other], 5).token_ids]
    comparison = compare(PROMPT, answer, expected.token_ids, ask)
    assert [tie.position for tie in comparison.near_ties][:1] == [0]
    assert comparison.mismatch is None
    wrong = [*answer[:3], (answer[3] + 1) % 250, *answer[4:]]
    assert compare(PROMPT, wrong, expected.token_ids, ask).mismatch is not None
