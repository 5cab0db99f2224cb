"""Connectors of nodes that keep their caches in another way. vLLM finds them by the path of this module."""

from __future__ import annotations

from vllm.v1.attention.backends import cpu_attn

from kvferry.connector.vllm import KvferryConnector


class WithoutHook(KvferryConnector):
    """As in vLLM before 0.31, which allocates the cache in memory that peers cannot map."""

    def get_mem_pool_context(self):
        return None


class PacksOtherwise(KvferryConnector):
    """As on a processor for which vLLM has other kernels. Every processor supports those of "vec16"."""

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):  # vLLM asks before it makes the model
        cpu_attn._get_attn_isa = lambda *arguments, **options: "vec16"
        return super().requires_piecewise_for_cudagraph(extra_config)
