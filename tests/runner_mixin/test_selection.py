"""How a node chooses its attention backend."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest
import torch

from kvferry.runner_mixin import (
    attention_backend_names,
    register_attention_backend,
    select_attention_backend,
)
from kvferry.runner_mixin.attention import selection
from kvferry.runner_mixin.attention.flashinfer_backend import FlashInferBackend
from kvferry.runner_mixin.attention.torch_backend import TorchAttentionBackend
from kvferry.transports.errors import BackendUnavailableError, ConfigurationError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def register(monkeypatch):
    monkeypatch.setattr(selection, "_BACKENDS", dict(selection._BACKENDS))
    return register_attention_backend


def test_torch_is_chosen_on_a_cpu():
    assert select_attention_backend(CPU, torch.float32) is TorchAttentionBackend
    assert select_attention_backend(CPU, torch.float32, "torch") is TorchAttentionBackend


def test_the_order_inside_a_page_is_part_of_the_choice():
    chosen = select_attention_backend(CPU, torch.float32, kv_cache_layout="HND")
    assert (chosen.get_name(), chosen.get_page_order()) == ("TORCH_HND", "HND")
    with pytest.raises(BackendUnavailableError, match="page order is NHD, not HND"):
        select_attention_backend(CPU, torch.float32, "TORCH", "HND")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigurationError, match="FLASHINFER, TORCH") as caught:
        select_attention_backend(CPU, torch.float32, "FLASH")
    assert caught.value.key == "attention_backend"


def test_flashinfer_says_why_it_cannot_work_here():
    with pytest.raises(BackendUnavailableError, match="needs a CUDA device"):
        select_attention_backend(CPU, torch.float16, "FLASHINFER")
    assert "not in torch.float32" in FlashInferBackend.get_unavailable_reason(CUDA, torch.float32)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="FlashInfer is installed")
def test_flashinfer_says_how_to_install_it():
    reason = FlashInferBackend.get_unavailable_reason(CUDA, torch.bfloat16)
    assert "pip install flashinfer-python" in reason
    assert select_attention_backend(CUDA, torch.bfloat16) is TorchAttentionBackend


def test_an_out_of_tree_backend_is_found_by_name(register, monkeypatch):
    module = types.ModuleType("own_attention")
    module.Own = type("Own", (TorchAttentionBackend,), {})
    module.NotOne = object
    monkeypatch.setitem(sys.modules, "own_attention", module)
    register("OWN", "own_attention:Own")
    assert select_attention_backend(CPU, torch.float32, "own") is module.Own
    assert attention_backend_names()[-1] == "OWN"
    register("OWN", "own_attention:NotOne")
    with pytest.raises(ConfigurationError, match="has no AttentionBackend subclass 'NotOne'"):
        select_attention_backend(CPU, torch.float32, "OWN")
    register("OWN", "own_attention:Missing")
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        select_attention_backend(CPU, torch.float32, "OWN")


def test_the_error_without_any_backend_gives_every_reason(monkeypatch):
    flashinfer_only = {"FLASHINFER": selection._BACKENDS["FLASHINFER"]}
    monkeypatch.setattr(selection, "_BACKENDS", flashinfer_only)
    with pytest.raises(BackendUnavailableError, match="FLASHINFER: it needs a CUDA device"):
        select_attention_backend(CPU, torch.float16)
