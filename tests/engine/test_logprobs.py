"""Log probabilities of answers: they are what the model's own logits give."""

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

PROMPT = [(7919 * index) % 251 for index in range(70)]


def _expected(folder: Any, tokens: list[int]) -> torch.Tensor:
    model = load_model(folder, torch.float32, torch.device("cpu"), "eager")
    with torch.inference_mode():
        scores: torch.Tensor = model(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)
    return scores


def test_logprobs_of_an_answer_are_the_models(make_node: Any, tiny_model: Any) -> None:
    node = make_node(max_num_batched_tokens=16)  # the prompt takes several steps
    # Beside another request, and again with the prompt in the prefix cache.
    for name in ("a", "b"):
        node.add(name, PROMPT, max_tokens=3, num_logprobs=2)
        node.add(f"{name}/silent", PROMPT[:9], max_tokens=3, num_logprobs=None)
        node.run()
        answer = node.tokens(name)
        scores = _expected(tiny_model("llama"), PROMPT + answer)
        of_answer = [entry for output in node.outputs[name] for entry in output.logprobs]
        assert [entry[0] for entry in of_answer] == [entry[1] for entry in of_answer]  # it is greedy
        assert [entry[0][0] for entry in of_answer] == answer
        wanted = [float(scores[len(PROMPT) - 1 + at, token]) for at, token in enumerate(answer)]
        assert [entry[0][1] for entry in of_answer] == pytest.approx(wanted, abs=1e-3)
        assert all(len(entry) == 3 for entry in of_answer)
        assert not any(output.logprobs for output in node.outputs[f"{name}/silent"])


def test_worker_processes_report_them_too() -> None:
    output = ModelRunnerOutput(("a",), ((3,),), logprobs={"a": ((3, -0.5), (3, -0.5), (4, -0.75))})
    assert decode(encode(output)) == output


def _ask(node: Any) -> Callable[[str | Sequence[int], int], Expectation]:
    def ask(prompt: str | Sequence[int], max_tokens: int) -> Expectation:
        assert not isinstance(prompt, str)
        tokens = node.answer(prompt, max_tokens=max_tokens, num_logprobs=2)
        (_, *likeliest) = node.outputs[list(node.outputs)[-1]][0].logprobs[0]
        return Expectation(prompt, tokens, likeliest)

    return ask


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
