"""What llm-d's P/D sidecar sends, to reference nodes.

`tests/support/llm_d.py` replays it, and names its version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.control_planes.conftest import Nodes
from tests.support.client import wait_until
from tests.support.llm_d import PREFILL_HEADER, Answer, Sidecar, go_json

pytestmark = pytest.mark.full

#: Go writes three of its characters in another way than Python.
PROMPT = "<A ferry> takes what others have packed & does not open the boxes. " * 3
MAX_TOKENS = 8
JSON = ("content-type", "application/json")


@pytest.fixture(scope="module")
def pair(nodes: Nodes) -> Nodes:
    """A prefill node and a decode node."""
    return nodes.start("p1", "d1")


@pytest.fixture(autouse=True)
def no_block_is_held(pair: Nodes) -> Iterator[None]:
    """Fail a test after which a node keeps a block."""
    yield
    pair.wait_whole()


@pytest.fixture
def sidecar(pair: Nodes) -> Sidecar:
    return Sidecar(host_of(pair, "d1"))


def host_of(pair: Nodes, name: str) -> str:
    return f"127.0.0.1:{pair[name].process.port}"


def ask(
    sidecar: Sidecar, pair: Nodes, *headers: tuple[str, str], prefill: str = "p1", **fields: Any
) -> Answer:
    """Send a completion as llm-d's gateway would: with the prefill node in a header."""
    body = {
        "model": "",
        "prompt": PROMPT,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }
    route = (PREFILL_HEADER, host_of(pair, prefill))
    return sidecar.post("/v1/completions", body | fields, [JSON, route, *headers])


def test_the_sidecars_two_requests_are_a_handoff(sidecar: Sidecar, pair: Nodes) -> None:
    answer = ask(sidecar, pair, seed=2**60 + 1)
    assert (answer.status, answer.headers["x-kv-transfer"]) == (200, "loaded")
    pair.assert_right(PROMPT, answer.body["choices"][0]["token_ids"], MAX_TOKENS)
    # The params went through Go's 64-bit floats, which have rounded a number of the request.
    offered = json.loads(sidecar.bodies[1])
    assert offered["kv_transfer_params"]["do_remote_prefill"] is True
    assert offered["seed"] == 1152921504606847000


def test_a_streamed_chat_is_a_handoff(sidecar: Sidecar, pair: Nodes) -> None:
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_completion_tokens": MAX_TOKENS,
        # Sampled tokens, because nothing sets a temperature: one of them may be the end token.
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = sidecar.post("/v1/chat/completions", body, [JSON, (PREFILL_HEADER, host_of(pair, "p1"))])
    assert (answer.status, answer.headers["x-kv-transfer"]) == (200, "loaded")
    # The sidecar writes the prefill node's `cached_tokens` into this object.
    assert answer.events[-1]["usage"]["completion_tokens"] == MAX_TOKENS


def test_the_id_of_the_client_is_the_id_on_both_nodes(sidecar: Sidecar, pair: Nodes) -> None:
    """If the client has sent an id, the sidecar sends a second header of that name after it."""
    answer = ask(sidecar, pair, ("x-request-id", "from-the-client"))
    assert answer.body["id"] == "cmpl-from-the-client"
    assert {each.headers["x-request-id"] for each in sidecar.answers} == {"cmpl-from-the-client"}


def test_a_request_without_a_prefill_node_is_computed_by_the_decode_node(
    sidecar: Sidecar, pair: Nodes
) -> None:
    answer = sidecar.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}, [JSON])
    assert (answer.status, answer.headers["x-kv-transfer"]) == (200, "none")


def test_without_an_offer_the_params_are_null(sidecar: Sidecar, pair: Nodes) -> None:
    answer = ask(sidecar, pair, prefill="d1")  # a decode node offers nothing
    assert b'"kv_transfer_params":null' in sidecar.bodies[1]
    assert (answer.status, answer.headers["x-kv-transfer"]) == (200, "none")


def test_a_refusal_of_the_decode_node_frees_the_prefill_nodes_blocks_at_once(
    sidecar: Sidecar, pair: Nodes
) -> None:
    answer = ask(sidecar, pair, max_tokens=0)
    assert answer.status == 400
    wait_until(pair["p1"].is_whole, timeout_s=1.0)


def test_the_replay_writes_json_as_go_does() -> None:
    assert go_json({"b": 2**53 + 1, "a": [1.0, 0.5, True, None, "ü<&>"]}) == (
        '{"a":[1,0.5,true,null,"ü\\u003c\\u0026\\u003e"],"b":9007199254740992}'.encode()
    )
