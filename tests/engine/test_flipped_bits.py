"""Bytes that change in transit are never used: the load fails, and the policy decides how the request
ends.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvferry.transports.testing import FlippingProxy

PROMPT = [random.Random(8).randrange(256) for _ in range(200)]

#: A byte in the middle of the prompt's cache, which has 150 KB and follows some control messages.
AT = 80_000


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_flipped_bit_makes_the_prompt_recomputed_or_fails_the_request(
    policy: str, make_node: Any, drive: Any, assert_same: Any
) -> None:
    prefill, decode = (
        make_node(connector="zeromq", role=role, options={"kv_load_failure_policy": policy})
        for role in ("kv_producer", "kv_consumer")
    )
    prefill.add("a", PROMPT, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    drive(prefill, until=lambda: prefill.is_over("a"))
    params = prefill.last("a").kv_transfer_params
    (address,) = params["remote_addresses"]
    with FlippingProxy(int(address.rpartition(":")[2]), at=AT) as proxy:
        params["remote_addresses"] = [f"zeromq://127.0.0.1:{proxy.port}"]
        decode.add("a", PROMPT, max_tokens=8, kv_transfer_params=params)
        drive(prefill, decode, until=lambda: decode.is_over("a") and prefill.is_whole)
    last = decode.last("a")
    if policy == "recompute":
        assert_same(decode.tokens("a"), "llama", PROMPT, 8)
    else:
        assert (last.finish_reason, decode.tokens("a")) == ("error", [])
        assert "its checksum differs" in last.error
    assert "its checksum differs" in last.metrics.transfer.error
    assert last.metrics.num_loaded_tokens == 0
    assert decode.is_whole
