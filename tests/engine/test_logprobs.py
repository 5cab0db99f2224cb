"""Log probabilities of answers: they are what the model's own logits give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvferry.lab.engine.weights import load_model

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
