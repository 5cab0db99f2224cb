"""What a node or a router promises its clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.main import main
from tests.support.client import DO_REMOTE_DECODE, wait_until
from tests.support.metrics_page import assert_promtool_is_content

pytestmark = pytest.mark.slow

PATHS = ["node", "router"]


@pytest.fixture(params=PATHS)
def server(request: pytest.FixtureRequest, tiny_fleet: Any) -> Any:
    """The same API twice: a single node, and the router of a pair."""
    return tiny_fleet.single if request.param == "node" else tiny_fleet.router


def test_a_completion_has_what_openai_promises(server: Any) -> None:
    reply = server.complete("To carry a letter", max_tokens=6)
    assert reply.status == 200
    assert reply.body["object"] == "text_completion"
    assert reply.body["choices"][0]["finish_reason"] == "length"
    assert isinstance(reply.body["choices"][0]["text"], str)
    assert len(reply.token_ids) == 6
    assert reply.body["usage"]["prompt_tokens"] == 17
    assert reply.body["usage"]["total_tokens"] == 23


@pytest.mark.every_transport
def test_a_stream_has_the_same_text_as_the_whole_answer(server: Any) -> None:
    whole = server.complete("To carry a letter", max_tokens=9)
    with server.streaming(
        "To carry a letter", max_tokens=9, stream_options={"include_usage": True}
    ) as events:
        *chunks, usage = events
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == whole.token_ids
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole.body["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 9


def test_a_chat_goes_through_the_models_template(server: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    reply = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, "temperature": 0})
    assert reply.status == 200
    assert reply.body["object"] == "chat.completion"
    assert reply.body["choices"][0]["message"]["role"] == "assistant"
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    again = server.post("/v1/chat/completions", {"messages": parts, "max_tokens": 4, "temperature": 0})
    assert again.body["choices"] == reply.body["choices"]


def test_a_client_can_ask_for_ids_instead_of_texts(server: Any) -> None:
    fields = {"logprobs": 2, "return_token_ids": True, "return_tokens_as_token_ids": True}
    reply = server.complete("abc", max_tokens=3, **fields)
    choice = reply.body["choices"][0]
    assert choice["prompt_token_ids"] == [64, 65, 66]
    names = [f"token_id:{token}" for token in reply.token_ids]
    assert choice["logprobs"]["tokens"] == names
    assert [max(top, key=top.get) for top in choice["logprobs"]["top_logprobs"]] == names
    refused = server.complete("abc", return_tokens_as_token_ids="yes")
    assert (refused.status, refused.body["error"]["param"]) == (400, "return_tokens_as_token_ids")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b"\xff\xfe", None),
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, 99999]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1, 2], [99999]]}, "prompt"),
        ({"prompt": ["a", "a" * 5000]}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": "a" * 5000}, "prompt"),
        ({"prompt": "a" * (7 << 20)}, "prompt"),
        ({"prompt": [1] * (1 << 20)}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": "a", "n": 257}, "n"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "top_logprobs": 2}, "top_logprobs"),
        ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
        ({"prompt": "a", "frequency_penalty": "x"}, "frequency_penalty"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "seed": 1.5}, "seed"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_is_refused_and_the_server_keeps_running(server: Any, body: Any, param: str | None) -> None:
    reply = server.post("/v1/completions", body)
    assert reply.status == 400
    assert reply.body["error"]["type"] == "invalid_request_error"
    assert reply.body["error"]["param"] == param
    assert reply.error
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize(
    ("fields", "param"), [({"n": 2}, "n"), ({"prompt": ["a", "b"]}, "kv_transfer_params")], ids=str
)
def test_a_prefill_is_of_one_prompt_and_one_answer(
    tiny_fleet: Any, fields: dict[str, Any], param: str
) -> None:
    """Each answer would be offered, and a decode node loads one offer."""
    # A refused list of prompts may have left an offer of which its router never heard. Its lease ends it.
    wait_until(tiny_fleet.prefill.is_whole)
    body = {"prompt": "a" * 40, "kv_transfer_params": DO_REMOTE_DECODE, **fields}
    reply = tiny_fleet.prefill.post("/v1/completions", body)
    assert (reply.status, reply.body["error"]["param"]) == (400, param)
    assert tiny_fleet.prefill.is_whole()


def test_an_unknown_model_and_an_unknown_path_are_not_found(server: Any) -> None:
    assert server.complete("a", model="gpt-0").status == 404
    assert server.post("/v1/embeddings", {}).status == 404


def test_a_refused_request_leaves_no_block_in_use(tiny_fleet: Any) -> None:
    assert tiny_fleet.prefill.is_whole()
    assert tiny_fleet.decode.is_whole()


@pytest.mark.parametrize(
    "params",
    [
        3,
        "x",
        [],
        {"do_remote_prefill": True},
        {"do_remote_prefill": "yes"},
        {"do_remote_prefill": True, "remote_engine_id": 1},
        {
            "do_remote_prefill": True,
            "remote_engine_id": "e",
            "remote_request_id": "r",
            "remote_block_ids": "1,2",
        },
    ],
    ids=lambda value: str(value)[:50],
)
def test_malformed_transfer_params_are_refused_and_the_node_keeps_running(
    tiny_fleet: Any, params: Any
) -> None:
    reply = tiny_fleet.decode.complete("a" * 40, max_tokens=2, kv_transfer_params=params)
    assert reply.status == 400
    assert reply.body["error"]["param"] == "kv_transfer_params"
    assert tiny_fleet.decode.complete("a" * 40, max_tokens=2).status == 200
    assert tiny_fleet.decode.is_whole()


def test_metrics_of_a_handoff_follow_prometheus_conventions(tiny_fleet: Any) -> None:
    assert (
        tiny_fleet.router.complete("A prompt that crosses, and is counted there", max_tokens=2).status == 200
    )
    for server in (tiny_fleet.prefill, tiny_fleet.decode, tiny_fleet.router):
        assert_promtool_is_content(server.get("/metrics")[1].decode())


def test_a_header_says_how_the_load_ended(tiny_fleet: Any) -> None:
    outcomes = []
    for name, change in (("loaded", {}), ("of an earlier start", {"remote_epoch": "1"})):
        prompt = f"An offer that is {name}, of a prompt that no node has seen before"
        offer = tiny_fleet.prefill.complete(prompt, max_tokens=1, kv_transfer_params=DO_REMOTE_DECODE)
        assert offer.headers["X-KV-Transfer"] == "none"
        params = {**offer.body["kv_transfer_params"], **change}
        reply = tiny_fleet.decode.complete(prompt, max_tokens=2, kv_transfer_params=params)
        assert reply.status == 200
        outcomes.append(reply.headers["X-KV-Transfer"])
    assert outcomes == ["loaded", "failed"]
    wait_until(tiny_fleet.prefill.is_whole)


# -- the command kvferry, asked about these nodes -----------------------------------------------------


def test_one_request_is_explained_on_the_router_and_both_nodes(
    tiny_fleet: Any, admin_key_file: Path, transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    router = tiny_fleet.router.process.url
    answer = tiny_fleet.router.complete("Why did this one take so long? " * 4, max_tokens=2)
    key = ("--admin-api-key-file", str(admin_key_file))
    servers: list[dict[str, Any]] = []

    def have_all_ended() -> bool:
        """A span ends after the last byte of its answer, and an offer after the message that releases it."""
        assert main(["explain", answer.body["id"], router, *key, "--json"]) == 0
        servers[:] = json.loads(capsys.readouterr().out)["servers"]
        names = {span["name"] for server in servers for span in server["spans"]}
        return names >= {"router", "node", "offer", "grant"} and all(server["spans"] for server in servers)

    wait_until(have_all_ended)
    assert [server["process"] for server in servers] == ["router", "prefill", "decode"]
    ours, prefill, decode = ({span["name"]: span for span in server["spans"]} for server in servers)
    assert set(ours) == {"router", "queue", "prefill_call", "decode_call"}
    assert set(prefill) == {"node", "prefill", "generate", "offer", "grant"}
    assert set(decode) == {"node", "claim", "load", "read", "load_and_first_token", "generate"}
    assert decode["load"]["attributes"]["transport"] == transport
    assert decode["claim"]["end"] <= decode["load"]["end"] <= decode["load_and_first_token"]["end"]
    assert not any(span["error"] for spans in (ours, prefill, decode) for span in spans.values())
    assert main(["explain", answer.body["id"], router, *key]) == 0
    text = capsys.readouterr().out
    assert f"loaded by {transport}: " in text
    assert "exposed" in text
    assert "guard held" in text


def test_a_request_that_no_node_knows_ends_with_status_1(
    tiny_fleet: Any, admin_key_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = ("--admin-api-key-file", str(admin_key_file))
    assert main(["explain", "no-such-request", tiny_fleet.decode.process.url, *key]) == 1
    assert "no spans of request 'no-such-request'" in capsys.readouterr().out
