"""`kvferry explain`: how it joins what nodes tell, and the stories that a node keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.cli.errors import CommandError
from kvferry.cli.explain import ask, tell
from kvferry.cli.main import main
from kvferry.connector.stats import HandoffEvent, KVConnectorStats
from kvferry.reference.engine.types import GenerationRequest, RequestMetrics, RequestOutput
from kvferry.reference.node.stories import MAX_EVENTS, MAX_STORIES, Stories

METRICS = RequestMetrics(8, 1, 0, 7, 0, 0.25, None)


def _output(finish_reason: Any, error: str = "") -> RequestOutput:
    return RequestOutput("cmpl-x-12345678", (1,), "a", finish_reason, error, None, METRICS)


def _stories(request_id: str = "cmpl-x-12345678") -> Stories:
    stories = Stories()
    stories.begin(GenerationRequest(request_id, (1, 2), kv_transfer_params={"do_remote_prefill": True}))
    return stories


def test_a_request_is_found_by_every_id_that_a_client_may_know() -> None:
    stories = _stories("cmpl-a-b-12345678")
    for wanted in ("a-b", "cmpl-a-b", "cmpl-a-b-12345678"):
        assert [story["request_id"] for story in stories.find(wanted)] == ["cmpl-a-b-12345678"]
    assert stories.find("b") == stories.find("a") == []


def test_a_story_has_the_events_of_the_connector_and_the_ending() -> None:
    stories = _stories()
    event = HandoffEvent("cmpl-x-12345678-7", 5.0, "read ended", {"bytes": 3})
    stories.observe_handoffs(KVConnectorStats(events=(event,)))
    for finish_reason in (None, None, "length"):
        stories.observe_output("cmpl-x-12345678", _output(finish_reason))
    (story,) = stories.find("x")
    assert story["phase"] == "decode"
    assert [e["name"] for e in story["events"]] == ["read ended", "first token", "finished"]
    assert story["events"][0] == {"at": 5.0, "name": "read ended", "bytes": 3}
    assert story["ending"]["metrics"]["num_loaded_tokens"] == 7


def test_stories_and_their_events_are_bounded() -> None:
    stories = Stories()
    for number in range(MAX_STORIES + 1):
        stories.begin(GenerationRequest(f"cmpl-{number}-12345678", (1,)))
    assert len(stories.latest()) == MAX_STORIES
    assert stories.find("0") == []
    for _ in range(MAX_EVENTS + 1):
        stories.note("cmpl-1-12345678", "again", 0.0, {})
    assert len(stories.find("1")[0]["events"]) == MAX_EVENTS


def test_events_of_several_nodes_are_told_in_the_order_of_their_times() -> None:
    def story(phase: str, arrived: float, *events: tuple[float, str]) -> dict[str, Any]:
        return {
            "request_id": phase,
            "phase": phase,
            "arrived": arrived,
            "num_prompt_tokens": 3,
            "events": [{"at": at, "name": name} for at, name in events],
            "ending": {},
        }

    def told(story: dict[str, Any]) -> dict[str, Any]:
        return {"engine_id": "e", "stories": [story]}

    pages = {
        "http://r/nodes": {"nodes": [{"url": "http://d"}, {"url": "http://p/"}]},
        "http://p/admin/requests/a%2Fb": told(story("prefill", 1.0, (1.2, "grant sent"))),
        "http://d/admin/requests/a%2Fb": told(story("decode", 1.1, (1.3, "grant received"))),
    }

    def get(url: str, timeout_s: float) -> str:
        if url in pages:
            return json.dumps(pages[url])
        raise CommandError('HTTP status 404: {"error": {"message": "no story"}}')

    nodes = ask("a/b", ["http://r", "http://x"], get)
    assert [node["error"] for node in nodes] == ["", "", "no story"]
    lines = "\n".join(tell("a/b", nodes))
    places = [
        lines.index(text) for text in ("0.0 ms", "100.0 ms", "200.0 ms  prefill  grant sent", "300.0 ms")
    ]
    assert places == sorted(places)


def test_a_url_without_its_scheme_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "a", "localhost:8000"]) == 2
    assert "did you mean 'http://localhost:8000'" in capsys.readouterr().err
