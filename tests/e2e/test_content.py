"""An offer is loaded only for the prompt that it was computed from, even if a router mixes offers up; nothing
leaks.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.lab.demo.near_tie import tolerance_of
from kvferry.lab.servers import Launcher
from tests.support.client import Client, Reply, wait_until
from tests.support.tiny_models import write_tiny_model

from .conftest import START_TIMEOUT_S, TINY_NODE, Fleet

pytestmark = pytest.mark.full

ONE = "A ferry takes what others have packed; it does not open the boxes. " * 4
#: The same length, with other tokens from the first block on.
OTHER = "B ferry shows what others have packed; it does not shut the boxes. " * 4
ASKED = {"max_tokens": 12, "logprobs": 0}
#: Far less than a lease (6 s), and enough for a busy machine.
AT_ONCE_S = 4.0


def assert_same_scores(reply: Reply, expected: Reply) -> None:
    """Check that the answers have the same tokens with the same log probabilities."""
    assert reply.token_ids == expected.token_ids
    assert len(reply.logprobs) == len(reply.token_ids)
    assert reply.logprobs == pytest.approx(expected.logprobs, abs=tolerance_of("float32"))


def assert_refused(reply: Reply, expected: Reply) -> None:
    """Check that nothing was read, and that the answer is right all the same."""
    assert reply.status == 200
    assert "was not computed from this request's prompt" in reply.transfer["error"]
    assert reply.transfer["num_bytes"] == 0
    assert_same_scores(reply, expected)


@pytest.mark.every_transport
def test_an_offer_of_another_prompt_is_not_loaded(tiny_fleet: Fleet, transport: str) -> None:
    other = f"{transport}: {OTHER}"
    params = tiny_fleet.prefill.offer(f"{transport}: {ONE}")
    expected = tiny_fleet.single.complete(other, **ASKED)
    reply = tiny_fleet.decode.complete(other, **ASKED, kv_transfer_params=params)
    assert_refused(reply, expected)
    wait_until(tiny_fleet.prefill.is_whole, AT_ONCE_S)
    # A request without the offer finds no wrong block in the prefix cache.
    again = tiny_fleet.decode.complete(other, **ASKED)
    assert_same_scores(again, expected)


def test_an_offer_under_another_salt_is_not_loaded(tiny_fleet: Fleet) -> None:
    prompt = f"salted: {ONE}"
    params = tiny_fleet.prefill.offer(prompt, cache_salt="one")
    expected = tiny_fleet.single.complete(prompt, **ASKED)
    for salt in ({"cache_salt": "another"}, {}):
        reply = tiny_fleet.decode.complete(prompt, **ASKED, kv_transfer_params=params, **salt)
        assert_same_scores(reply, expected)
        assert reply.transfer["error"]
        assert reply.transfer["num_bytes"] == 0


def test_an_offer_of_a_shorter_prompt_is_loaded_as_far_as_it_goes(tiny_fleet: Fleet) -> None:
    prompt = f"shorter: {ONE}"
    params = tiny_fleet.prefill.offer(prompt[:150])
    expected = tiny_fleet.single.complete(prompt, **ASKED)
    reply = tiny_fleet.decode.complete(prompt, **ASKED, kv_transfer_params=params)
    assert_same_scores(reply, expected)
    assert not reply.transfer["error"]
    assert reply.body["metrics"]["num_loaded_tokens"] == 150


def test_nodes_with_other_chat_templates_answer_right(launcher: Launcher, tmp_path: Path) -> None:
    """Templates that insert different dates, for example: prompts have the same length and other tokens."""
    nodes = []
    for role, word in (("prefill", "Monday"), ("decode", "Friday")):
        folder = write_tiny_model(tmp_path / role / "model")  # under one name
        set_chat_template(folder, f"Today is {word}. " + "{% for m in messages %}{{ m.content }}{% endfor %}")
        nodes.append(launcher.start_node(role, role, "--model", str(folder), *TINY_NODE))
    launcher.wait_listening(nodes, START_TIMEOUT_S)
    process = launcher.start_router("router", [nodes[0]], [nodes[1]])
    launcher.wait_ready([*nodes, process], START_TIMEOUT_S)
    router, decode = Client(process), Client(nodes[1])
    body = {"messages": [{"role": "user", "content": ONE}], "max_tokens": 8, "temperature": 0}
    expected = decode.post("/v1/chat/completions", {**body, "cache_salt": "alone"})
    reply = router.post("/v1/chat/completions", body)
    assert "was not computed from this request's prompt" in reply.transfer["error"]
    honest = decode.post("/v1/chat/completions", body)
    assert reply.body["choices"] == honest.body["choices"] == expected.body["choices"]
    one = {**body, "max_tokens": 1}  # the prefill node's only token would be an answer to the other prompt
    answers = [server.post("/v1/chat/completions", one).body["choices"] for server in (router, decode)]
    assert answers[0] == answers[1]


def set_chat_template(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
