"""The router asks both nodes at once: the same tokens come out, and the cache crosses while the prompt is computed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.client import DO_REMOTE_DECODE, assert_answers_like, wait_until

pytestmark = pytest.mark.full
#: Seven chunks.
PROMPT = "The ferry leaves at nine, and nobody on the quay has a watch. " * 7


def test_the_cache_crosses_while_the_prompt_is_computed(tiny_fleet: Any) -> None:
    before = tiny_fleet.router.metric("kvferry_router_rendezvous_total")
    hidden = []
    for number in range(3):
        prompt = f"{number} {PROMPT}"
        reply = tiny_fleet.router.complete(prompt, max_tokens=4, logprobs=0)
        assert (reply.status, reply.headers["X-KV-Transfer"]) == (200, "loaded")
        assert_answers_like(tiny_fleet.single, prompt, reply.answer, 4)
        hidden.append(reply.transfer["seconds"] - reply.transfer["exposed_seconds"])
    assert tiny_fleet.router.metric("kvferry_router_rendezvous_total") == before + 3
    # The first read began before the whole prompt was computed. A busy machine may miss one.
    assert max(hidden) > 0, hidden
    wait_until(tiny_fleet.prefill.is_whole)
    wait_until(tiny_fleet.decode.is_whole)


def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(tiny_fleet: Any) -> None:
    for name in ("prefill", "decode"):
        node = getattr(tiny_fleet, name)
        tiny_fleet.router.hang_up_during(
            lambda node=node: not node.is_whole(), f"{name} {PROMPT}", max_tokens=9
        )
        wait_until(tiny_fleet.prefill.is_whole)
        wait_until(tiny_fleet.decode.is_whole)


def test_a_decode_request_with_a_stale_epoch_is_answered_by_policy(tiny_fleet: Any) -> None:
    offer = tiny_fleet.prefill.complete(PROMPT, max_tokens=1, kv_transfer_params=DO_REMOTE_DECODE)
    where = {
        key: offer.body["kv_transfer_params"][key]
        for key in ("remote_engine_id", "remote_addresses", "tp_size")
    }
    wish = {"do_remote_prefill": True, "rendezvous": "5" * 32, "remote_epoch": "5", **where}
    reply = tiny_fleet.decode.complete(PROMPT, max_tokens=2, kv_transfer_params=wish)
    assert (reply.status, reply.headers["X-KV-Transfer"]) == (200, "failed")
    assert "it was restarted" in reply.transfer["error"]
    release = {**offer.body["kv_transfer_params"], "do_remote_prefill": False, "do_release": True}
    tiny_fleet.prefill.complete([0], max_tokens=1, kv_transfer_params=release)
    wait_until(tiny_fleet.prefill.is_whole)
    wait_until(tiny_fleet.decode.is_whole)
