"""A receipt says how the cache of an answer came, to the clients that may ask for one."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from kvferry.lab.client import events_of
from kvferry.lab.servers import LaunchedProcess, Launcher, Spawn
from tests.e2e.conftest import START_TIMEOUT_S

KEY = "sk-of-a-client"
ASKS = {"X-KV-Receipt": "1"}
WITH_KEY = {**ASKS, "Authorization": f"Bearer {KEY}"}


def prompt_of(number: int) -> list[int]:
    """Return a prompt of whose blocks no other one has any."""
    return [3 + (number * 31 + position * 7) % 200 for position in range(100)]


def receipts_of(
    door: LaunchedProcess, headers: Mapping[str, str], **body: Any
) -> list[dict[str, Any]] | None:
    """Return the receipts of an answer, whole or streamed; None if it has none."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    request = urllib.request.Request(
        door.url + path,
        json.dumps({"max_tokens": 4, **body}).encode(),
        {"Content-Type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        if not body.get("stream"):
            found: list[dict[str, Any]] | None = json.load(response).get("kv_receipts")
            return found
        events = list(events_of(response))
    (*others, last) = events
    assert not any("kv_receipts" in event for event in others)
    assert "kv_receipts" not in last or last["choices"] == []
    return last.get("kv_receipts")


@pytest.fixture(scope="module")
def doors(
    spawn: Spawn, tiny_arguments: Sequence[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[str, LaunchedProcess]]:
    """Routers before one pair, with and without keys, and one before a node that computes its prompts
    itself. The decode node of another pair cannot read what is offered to it.
    """
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(KEY)
    keys.chmod(0o600)
    blind = ("--connector-option", 'require_transport=["ucx:rc*"]')
    with Launcher(spawn) as launcher:
        nodes = [
            launcher.start_node(name, role, *tiny_arguments, *more)
            for name, role, more in (
                ("prefill", "prefill", ()),
                ("decode", "decode", ()),
                ("blind", "decode", blind),
                ("both", "both", ()),
            )
        ]
        launcher.wait_ready(nodes, START_TIMEOUT_S)
        prefill, decode, cannot, both = nodes
        doors = {
            "asked": launcher.start_router("asked", [prefill], [decode], "--receipts", "asked"),
            "always": launcher.start_router("always", [prefill], [decode], "--receipts", "always"),
            "without keys": launcher.start_router("open", [prefill], [decode]),
            "with keys": launcher.start_router("closed", [prefill], [decode], "--api-key-file", str(keys)),
            "blind": launcher.start_router("to-blind", [prefill], [cannot], "--receipts", "asked"),
            "local": launcher.start(
                "local", "router", "--port", "0", "--node", both.url, "--receipts", "asked"
            ),
        }
        launcher.wait_ready(doors.values(), START_TIMEOUT_S)
        yield {**doors, "prefill": prefill, "decode": decode, "node of local": both}


def test_only_clients_that_may_ask_get_a_receipt(doors: Mapping[str, LaunchedProcess]) -> None:
    for door, headers, has_one in (
        ("asked", ASKS, True),
        ("asked", {}, False),
        ("always", {}, True),
        ("without keys", ASKS, False),
        ("with keys", WITH_KEY, True),
        ("with keys", {"Authorization": f"Bearer {KEY}"}, False),
    ):
        for stream in (False, True):
            found = receipts_of(doors[door], headers, prompt=prompt_of(1), stream=stream)
            assert (found is not None) == has_one, (door, headers, stream)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_a_receipt_names_both_nodes_and_what_crossed(
    doors: Mapping[str, LaunchedProcess], transport: str, kind: str, stream: bool
) -> None:
    number = 2 + 2 * (kind == "chat") + stream
    prompt = {"messages": [{"role": "user", "content": f"{number} ferries " * 20}]}
    body = {"prompt": prompt_of(number)} if kind == "completion" else prompt
    (first,) = receipts_of(doors["asked"], ASKS, stream=stream, **body) or ()
    assert (first["way"], first["moves"], first["why_not_loaded"]) == ("rendezvous", 0, "")
    assert (first["prefill"], first["decode"]) == (doors["prefill"].url, doors["decode"].url)
    assert first["transport"] == transport
    assert first["mechanism"]
    assert first["bytes"] > 0
    assert first["ms"] > 0
    assert first["exposed_ms"] >= 0
    assert first["checked"] == ["guard", *(["xxh3"] if transport in ("tcp", "zeromq") else [])]
    assert first["cached_tokens"] == 0
    assert first["loaded_tokens"] + first["computed_tokens"] == first["prompt_tokens"] > 0

    (again,) = receipts_of(doors["asked"], ASKS, stream=stream, **body) or ()
    assert again["cached_tokens"] > 0
    assert again["bytes"] < first["bytes"]


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_have_a_receipt_each_in_their_order(
    doors: Mapping[str, LaunchedProcess], stream: bool
) -> None:
    prompts = [prompt_of(10 + stream)[:50], prompt_of(12 + stream), prompt_of(14 + stream)[:70]]
    found = receipts_of(doors["asked"], ASKS, prompt=prompts, stream=stream) or ()
    assert [one["prompt_tokens"] for one in found] == [50, 100, 70]
    assert all(one["bytes"] for one in found)


def test_a_receipt_says_in_words_why_no_cache_was_used(doors: Mapping[str, LaunchedProcess]) -> None:
    (failed,) = receipts_of(doors["blind"], ASKS, prompt=prompt_of(20)) or ()
    assert failed["why_not_loaded"].startswith("the load failed: ")
    assert "require_transport=['ucx:rc*']" in failed["why_not_loaded"]
    assert (failed["bytes"], failed["checked"], failed["computed_tokens"]) == (0, [], 100)

    (local,) = receipts_of(doors["local"], ASKS, prompt=prompt_of(21)) or ()
    assert (local["way"], local["prefill"], local["decode"]) == ("alone", None, doors["node of local"].url)
    assert local["why_not_loaded"].startswith("local: ")
    assert local["computed_tokens"] == 100
