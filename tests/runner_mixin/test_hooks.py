"""The connector's two calls around an attention layer."""

from __future__ import annotations

import pytest
import torch

from kvferry.runner_mixin import (
    AttentionLayer,
    AttentionParams,
    ForwardContext,
    KVConnectorModelRunnerMixin,
    maybe_transfer_kv_layer,
    select_attention_backend,
    set_forward_context,
)

NAME = "layers.0.attn"
CPU = torch.device("cpu")


@pytest.fixture
def layer():
    backend = select_attention_backend(CPU, torch.float32)
    layer = AttentionLayer(NAME, AttentionParams(2, 2, 8, 1.0), backend)
    layer.kv_cache = [torch.zeros(2, 2, 4, 2, 8)]
    return layer


def test_a_layer_is_loaded_before_and_saved_after(connector, layer, make_step):
    with set_forward_context(ForwardContext({NAME: layer})):
        with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(make_step()):
            with maybe_transfer_kv_layer(NAME):
                connector.calls.append("attention")
    assert connector.calls[2:5] == [f"wait_for_layer_load {NAME}", "attention", f"save_kv_layer {NAME}"]


def test_nothing_is_saved_when_the_layer_raises(connector, layer, make_step):
    @maybe_transfer_kv_layer(NAME)
    def attention() -> None:
        raise ZeroDivisionError

    with set_forward_context(ForwardContext({NAME: layer})):
        with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(make_step()):
            with pytest.raises(ZeroDivisionError):
                attention()
    assert f"save_kv_layer {NAME}" not in connector.calls


def test_nothing_happens_outside_a_step(connector):
    with maybe_transfer_kv_layer(NAME):
        pass
    assert connector.calls == []
