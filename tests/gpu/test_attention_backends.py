"""The attention backends compute on a GPU what torch computes."""

from __future__ import annotations

import pytest
import torch

from kvferry.runner_mixin import AttentionParams
from kvferry.runner_mixin.attention.flashinfer_backend import FlashInferBackend
from kvferry.runner_mixin.attention.torch_backend import TorchAttentionBackend
from tests.support.attention_steps import PARAMS, STEPS, run_step

CUDA = torch.device("cuda")


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("step", STEPS)
def test_torch_computes_the_same_on_a_gpu(step: str, params: AttentionParams) -> None:
    cpu = run_step(TorchAttentionBackend, step, params, torch.device("cpu"), torch.float32)
    cuda = run_step(TorchAttentionBackend, step, params, CUDA, torch.float32)
    torch.testing.assert_close(cuda, cpu, rtol=1e-3, atol=1e-4)


# FlashInfer compiles a kernel for each kind of step and of layer, once per machine, for about a minute.
@pytest.mark.timeout(300)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("step", STEPS)
def test_flashinfer_agrees_with_torch(step: str, params: AttentionParams) -> None:
    if reason := FlashInferBackend.get_unavailable_reason(CUDA, torch.float16):
        pytest.skip(reason)
    ours = run_step(TorchAttentionBackend, step, params, CUDA, torch.float16)
    theirs = run_step(FlashInferBackend, step, params, CUDA, torch.float16)
    torch.testing.assert_close(theirs, ours, rtol=2e-2, atol=2e-2)
