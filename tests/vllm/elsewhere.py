"""A connector as on a processor for which vLLM has other kernels; every processor supports "vec16"."""

from __future__ import annotations

from vllm.v1.attention.backends import cpu_attn

from kvferry.connector.vllm import KvferryConnector

# vLLM imports a connector's module before it makes the model.
cpu_attn._get_attn_isa = lambda *arguments, **options: "vec16"


class PacksOtherwise(KvferryConnector):
    pass
