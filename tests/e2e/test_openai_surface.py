"""What tools expect of OpenAI's API beyond one plain answer: the same from a single node and through a
handoff.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import pytest

import kvferry

pytestmark = pytest.mark.full

#: A few blocks, so that there is something to hand over.
LONG = "A ferry carries a box from one quay to the other, and nobody opens it on board. "
TOKENS = [(31 * index) % 250 for index in range(40)]

BODIES: dict[str, dict[str, Any]] = {
    "n": {"prompt": "n: " + LONG, "n": 3, "temperature": 1.0, "seed": 7},
    "several prompts": {"prompt": ["1: " + LONG, "short", "2: " + LONG]},
    "lists of tokens, n": {"prompt": [TOKENS, TOKENS[::-1]], "n": 2, "temperature": 0.8, "seed": 3},
    "logprobs": {"prompt": "l: " + LONG, "logprobs": 2},
    "logprobs of the chosen one only": {"prompt": "z: " + LONG, "logprobs": 0},
}


def _choices(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    wanted = ("index", "text", "token_ids", "finish_reason", "logprobs")
    return [{key: choice[key] for key in wanted} for choice in body["choices"]]


def _assembled(events: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Put the chunks of a stream together."""
    choices: dict[int, dict[str, Any]] = defaultdict(lambda: {"text": "", "token_ids": [], "logprobs": None})
    for choice in (choice for event in events for choice in event["choices"]):
        whole = choices[choice["index"]]
        whole |= {"index": choice["index"], "finish_reason": choice["finish_reason"]}
        whole["text"] += choice["text"]
        whole["token_ids"] += choice["token_ids"]
        for key, values in (choice["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or defaultdict(list)
            whole["logprobs"][key] += values
    return [choices[index] for index in sorted(choices)]


def _assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one | {"logprobs": None} == other | {"logprobs": None}
        assert bool(one["logprobs"]) == bool(other["logprobs"])
        if one["logprobs"]:
            for key in ("tokens", "text_offset"):
                assert one["logprobs"][key] == other["logprobs"][key]
            wanted = other["logprobs"]["token_logprobs"]
            assert one["logprobs"]["token_logprobs"] == pytest.approx(wanted, abs=1e-3)
            for mine, theirs in zip(
                one["logprobs"]["top_logprobs"], other["logprobs"]["top_logprobs"], strict=True
            ):
                assert mine == pytest.approx(theirs, abs=1e-3)


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_pair_answers_as_a_single_node_whole_and_streamed(tiny_fleet: Any, body: dict[str, Any]) -> None:
    fields = {"max_tokens": 5, **body}
    expected = tiny_fleet.single.complete(**fields)
    assert expected.status == 200, expected.body
    num_prompts = len(body["prompt"]) if isinstance(body["prompt"], list) else 1
    num_choices = num_prompts * body.get("n", 1)
    assert [choice["index"] for choice in expected.body["choices"]] == list(range(num_choices))
    routed = tiny_fleet.router.complete(**fields)
    assert routed.status == 200, routed.body
    _assert_alike(_choices(routed.body), _choices(expected.body))
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [routed.body["usage"][key] for key in counts] == [expected.body["usage"][key] for key in counts]
    if num_prompts == 1:
        assert routed.headers["X-KV-Transfer"] == "loaded"
    for server in (tiny_fleet.single, tiny_fleet.router):
        with server.streaming(**fields, stream_options={"include_usage": True}) as events:
            *chunks, last = events
        _assert_alike(_assembled(chunks), _choices(expected.body))
        assert len({event["id"] for event in (*chunks, last)}) == 1
        assert last["usage"]["total_tokens"] == expected.body["usage"]["total_tokens"]


def test_a_chat_has_logprobs_and_several_answers(tiny_fleet: Any) -> None:
    body = {
        "messages": [{"role": "user", "content": LONG}],
        "max_tokens": 3,
        "n": 2,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    single, routed = (
        server.post("/v1/chat/completions", body).body["choices"]
        for server in (tiny_fleet.single, tiny_fleet.router)
    )
    assert [choice["message"] for choice in routed] == [choice["message"] for choice in single]
    for mine, theirs in zip(routed, single, strict=True):
        content, expected = mine["logprobs"]["content"], theirs["logprobs"]["content"]
        assert [each["token"] for each in content] == [each["token"] for each in expected]
        assert [each["logprob"] for each in content] == pytest.approx(
            [each["logprob"] for each in expected], abs=1e-3
        )
        assert all(each["top_logprobs"][0]["token"] == each["token"] for each in content)
        assert all(len(each["top_logprobs"]) == 2 for each in content)
    for fields, param in (
        ({"logprobs": 2, "top_logprobs": None}, "logprobs"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": False}, "top_logprobs"),
        ({"echo": True}, "echo"),
    ):
        refused = tiny_fleet.router.post("/v1/chat/completions", {**body, **fields})
        assert (refused.status, refused.body["error"]["param"]) == (400, param)


def test_models_version_and_a_page_about_the_api(tiny_fleet: Any) -> None:
    for server in (tiny_fleet.single, tiny_fleet.router):
        (listed,) = json.loads(server.get("/v1/models")[1])["data"]
        assert json.loads(server.get("/v1/models/tiny")[1]) == listed
        status, raw = server.get("/v1/models/some/other")
        assert (status, json.loads(raw)["error"]["code"]) == (404, "model_not_found")
        assert json.loads(server.get("/version")[1]) == {"version": kvferry.__version__}
        described = json.loads(server.get("/openapi.json")[1])["paths"]
        assert {"/v1/completions", "/v1/models/{model}", "/health"} <= described.keys()
        page = server.get("/docs")[1].decode()
        assert "return_token_ids" in page
        assert all(path in page for path in described)
        assert "src=" not in page
        assert "//" not in page  # it fetches nothing


@pytest.mark.skipif(find_spec("openai") is None, reason="the package openai is not installed")
def test_the_openai_client_talks_to_a_pair(tiny_fleet: Any) -> None:
    import openai

    url = tiny_fleet.router.process.url + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        assert client.models.retrieve("tiny").id == "tiny"
        fields: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "temperature": 0}
        prompts = ["client 1: " + LONG, "client 2: " + LONG]
        whole = client.completions.create(prompt=prompts, n=2, logprobs=2, **fields)
        assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 16
        stream = client.completions.create(prompt=prompts, n=2, logprobs=2, stream=True, **fields)
        texts = defaultdict(str)
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == {choice.index: choice.text for choice in whole.choices}
        chat = client.chat.completions.create(
            messages=[{"role": "user", "content": LONG}],
            **{**fields, "n": 2, "logprobs": True, "top_logprobs": 1},
        )
        assert chat.choices[1].logprobs is not None
        assert len(chat.choices[1].logprobs.content or ()) == 4
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(prompt="a", best_of=2, **fields)
        assert refused.value.param == "best_of"
