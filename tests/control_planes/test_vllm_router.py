"""vllm-router, the router of the vLLM project, in front of reference nodes. `make tools` gets it.

In its mode for prefill and decode nodes it neither retries a request nor uses its circuit breakers; both work
in its plain mode. So the tests put a plain one in front of two that have a pair of nodes each, as
docs/behind-a-router.md advises.
"""

from __future__ import annotations

import http.client
import itertools
import json
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from kvferry.lab.bench.vllm_router import find_vllm_router, start_router_program, start_vllm_router
from kvferry.lab.servers import (
    LaunchedProcess,
    Launcher,
    Spawn,
    free_port,
)
from tests.control_planes.conftest import START_TIMEOUT_S, Nodes
from tests.support.client import TIMEOUT_S, Client, Reply, wait_until

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        find_vllm_router() is None,
        reason="vllm-router is not installed; `make tools` gets it",
    ),
]

PROMPT = "A ferry takes what others have packed; it does not open the boxes. "
MAX_TOKENS = 12
#: As many tokens as fit, so that the answer is still being computed when something happens to its node.
LONG_ANSWER = 400
CLOSED, OPEN = 0, 1
#: Without it a node that drains would count as alive, and get requests that it refuses.
READY = ("--health-check-endpoint", "/ready")
#: After two failures a worker gets no request for a second. One success is enough then.
CIRCUIT_BREAKER = (
    *("--cb-failure-threshold", "2", "--cb-timeout-duration-secs", "1", "--cb-success-threshold", "1"),
    # Only the circuit breaker notices failures: no health check comes before the test's end.
    *("--health-check-interval-secs", "600"),
)


@dataclass(frozen=True)
class Fleet:
    """Two pairs of nodes, and what stands in front of them.

    Attributes:
        pairs: Two vllm-routers, each in front of one pair: `p1` and `d1`, `p2` and `d2`.
        front: A plain vllm-router in front of the two.
        front_metrics_port: Where `front` serves its metrics.
        by_prefix, by_session: vllm-routers in front of all four nodes, with policies that look at the prompt
            or at the session.
    """

    nodes: Nodes
    pairs: tuple[LaunchedProcess, ...]
    front: LaunchedProcess
    front_metrics_port: int
    by_prefix: LaunchedProcess
    by_session: LaunchedProcess

    def circuit(self, pair: int) -> int:
        """Return the state of the front's circuit breaker for a pair."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.front_metrics_port}/metrics") as response:
            text = response.read().decode()
        found = re.search(
            rf'^vllm_router_cb_state{{worker="{self.pairs[pair].url}"}} (\d)', text, re.MULTILINE
        )
        return int(found[1]) if found else CLOSED


@pytest.fixture(scope="module")
def fleet(nodes: Nodes, launcher: Launcher) -> Fleet:
    nodes.start("p1", "d1", "p2", "d2")
    prefill, decode = ([nodes[f"{kind}{n}"].process for n in (1, 2)] for kind in "pd")
    pairs = tuple(
        start_vllm_router(launcher, f"pair {n}", [p], [d], *READY)
        for n, (p, d) in enumerate(zip(prefill, decode, strict=True))
    )
    by_prefix = start_vllm_router(launcher, "by prefix", prefill, decode, *READY, "--policy", "cache_aware")
    by_session = start_vllm_router(
        launcher, "by session", prefill, decode, *READY, "--policy", "consistent_hash"
    )
    launcher.wait_ready([*pairs, by_prefix, by_session], START_TIMEOUT_S)
    port = free_port()
    urls = ("--worker-urls", *(pair.url for pair in pairs), "--policy", "round_robin")
    front = start_router_program(launcher, "front", *urls, *CIRCUIT_BREAKER, "--prometheus-port", str(port))
    launcher.wait_ready([front], START_TIMEOUT_S)
    return Fleet(nodes, pairs, front, port, by_prefix, by_session)


@pytest.fixture(autouse=True)
def no_block_is_held(fleet: Fleet) -> Iterator[None]:
    """Fail a test after which a node that still runs keeps blocks of a request, or an offer."""
    yield
    fleet.nodes.wait_whole()


def post(
    router: LaunchedProcess, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Reply:
    with Client(router).requesting(path, body, headers or {}) as response:
        payload = response.read()
        names = {name.lower(): value for name, value in response.getheaders()}
    body = json.loads(payload) if payload.startswith(b"{") else {"error": {"message": payload.decode()}}
    return Reply(response.status, body, names)


def complete(router: LaunchedProcess, prompt: str, session: str = "") -> Reply:
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
    return post(router, "/v1/completions", body, {"X-Session-ID": session} if session else {})


def counts(nodes: Sequence[Client], name: str) -> list[int]:
    return [int(node.metric(f"kvferry_engine_{name}_total")) for node in nodes]


def test_an_answer_is_that_of_a_single_node(fleet: Fleet) -> None:
    prompt = PROMPT * 3
    reply = complete(fleet.front, prompt)
    assert (reply.status, reply.headers["x-kv-transfer"]) == (200, "loaded")
    fleet.nodes.assert_right(prompt, reply.token_ids, MAX_TOKENS)
    with Client(fleet.front).streaming(prompt, max_tokens=MAX_TOKENS) as events:
        streamed = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert streamed == reply.token_ids
    chat = {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": 4, "temperature": 0}
    answer = post(fleet.front, "/v1/chat/completions", chat)
    assert (answer.status, answer.headers["x-kv-transfer"]) == (200, "loaded")
    # Both nodes got one id, with which `kvferry explain` finds the request on them.
    assert answer.body["id"].startswith("chatcmpl-___prefill_addr_127.0.0.1:")


def test_a_refused_request_is_refused_with_the_nodes_own_words(fleet: Fleet) -> None:
    reply = post(fleet.pairs[0], "/v1/completions", {"prompt": "a", "max_tokens": 4, "temperature": -1})
    assert reply.status == 400
    assert "temperature" in reply.error


def test_prompts_with_the_same_beginning_go_to_the_same_prefill_node(fleet: Fleet) -> None:
    nodes = [fleet.nodes["p1"], fleet.nodes["p2"]]
    before, cached = counts(nodes, "prompt_tokens"), counts(nodes, "cached_tokens")
    for n in range(4):
        assert complete(fleet.by_prefix, f"The log of the Heron. {PROMPT * 3}{n}").status == 200
    used = [
        n
        for n, (now, then) in enumerate(zip(counts(nodes, "prompt_tokens"), before, strict=True))
        if now > then
    ]
    assert len(used) == 1
    # Three of the four found most of their prompt in the node's prefix cache.
    (node,) = used
    assert counts(nodes, "cached_tokens")[node] - cached[node] >= 3 * len(PROMPT * 2)


def test_a_session_stays_on_one_prefill_node(fleet: Fleet) -> None:
    nodes = [fleet.nodes["p1"], fleet.nodes["p2"]]

    def node_of(session: str, prompt: str) -> int:
        before = counts(nodes, "prompt_tokens")
        assert complete(fleet.by_session, prompt, session).status == 200
        (used,) = [n for n, now in enumerate(counts(nodes, "prompt_tokens")) if now > before[n]]
        return used

    first = node_of("session 0", "one prompt")
    assert node_of("session 0", "a prompt with another beginning") == first
    # Sessions are spread: some other one is on the other node.
    assert any(
        node_of(f"session {n}", "one prompt") != first for n in itertools.islice(itertools.count(1), 30)
    )


def test_a_client_that_leaves_frees_the_blocks_of_both_nodes(fleet: Fleet) -> None:
    decode = fleet.nodes["d1"]

    def is_answering() -> bool:
        return decode.metric("kvferry_engine_running_requests") > 0

    client = Client(fleet.pairs[0])
    with client.streaming(PROMPT, max_tokens=LONG_ANSWER, ignore_eos=True) as events:
        next(events)
        wait_until(is_answering)
    # `no_block_is_held` checks the rest.


def test_nodes_that_are_replaced_or_die(fleet: Fleet, spawn: Spawn) -> None:
    """The last test: it ends the first pair.

    A node that drains loses nothing. What a node that dies took along, the front repeats at the other pair.
    It uses the first pair no longer, and again after a restart.
    """
    nodes, prompts = fleet.nodes, [f"{PROMPT}{n}" for n in range(4)]
    with Launcher(spawn) as launcher:
        # A prefill node is replaced under load, and no request is lost: the router has no retries here.
        drained = nodes["p1"].process
        drained.terminate()
        answers = _answers_while(fleet.by_session, lambda: drained.is_running)
        assert drained.wait(0) == 0
        nodes.start("p1", launcher=launcher)
        answers |= _answers_while(fleet.by_session, lambda: counts([nodes["p1"]], "prompt_tokens") == [0])
        for token_ids in answers:
            nodes.assert_right(PROMPT, token_ids, MAX_TOKENS)

        # The prefill node dies in the middle of two prefills.
        _assert_right(nodes, prompts, _ask_while_dying(fleet, "p1", prompts, half_are_done))
        assert fleet.circuit(0) == OPEN
        nodes.start("p1", launcher=launcher)
        _assert_used_again(fleet, prompts)

        # The decode node dies in the middle of an answer. What came of it is right, and it has no regular
        # end.
        came: list[int] = []
        with Client(fleet.pairs[0]).streaming(PROMPT, max_tokens=LONG_ANSWER, ignore_eos=True) as events:
            came += next(events)["choices"][0]["token_ids"]
            nodes["d1"].process.kill()
            with pytest.raises((AssertionError, http.client.HTTPException, ConnectionError)):
                _read_tokens(events, came)
        assert len(came) < LONG_ANSWER
        nodes.assert_right(PROMPT, came, len(came), ignore_eos=True)
        nodes.start("d1", launcher=launcher)
        _assert_used_again(fleet, prompts)

        # The decode node dies before it has looked at what the prefill node offers, which comes free with its
        # lease.
        replies = _ask_while_dying(fleet, "d1", prompts, lambda asked: is_offering(nodes["p1"]))
        _assert_right(nodes, prompts, replies)
        wait_until(nodes["p1"].is_whole)


def _answers_while(router: LaunchedProcess, holds: Callable[[], bool]) -> set[tuple[int, ...]]:
    """Send the same prompt in one session after another while the condition holds.

    Returns the answers' token ids.
    """
    answers: set[tuple[int, ...]] = set()
    deadline = time.monotonic() + TIMEOUT_S
    sessions = itertools.count()
    while holds():
        reply = complete(router, PROMPT, session=f"session {next(sessions)}")
        assert reply.status == 200, reply.error
        assert time.monotonic() < deadline
        answers.add(tuple(reply.token_ids))
    return answers


Asked = Sequence[Future[Reply]]


def half_are_done(asked: Asked) -> bool:
    return sum(each.done() for each in asked) >= len(asked) // 2


def is_offering(prefill: Client) -> bool:
    return prefill.metric("kvferry_engine_offered_requests") > 0


def _ask_while_dying(
    fleet: Fleet, name: str, prompts: Sequence[str], when: Callable[[Asked], bool]
) -> list[Reply]:
    """Ask the front all prompts at once, and kill a node of the first pair that has half of them and does not
    answer.
    """
    lost = fleet.nodes[name].process
    lost.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(complete, fleet.front, prompt) for prompt in prompts]
        wait_until(lambda: when(asked))
        lost.kill()
        return [each.result() for each in asked]


def _assert_used_again(fleet: Fleet, prompts: Sequence[str]) -> None:
    """Ask until the first pair answers and the front has closed its circuit; then both pairs answer, and
    answer rightly.
    """
    wait_until(lambda: complete(fleet.pairs[0], PROMPT).status == 200)
    wait_until(lambda: complete(fleet.front, PROMPT).status == 200 and fleet.circuit(0) == CLOSED)
    prefill = [fleet.nodes["p1"]]
    before = counts(prefill, "prompt_tokens")
    _assert_right(fleet.nodes, prompts, [complete(fleet.front, prompt) for prompt in prompts])
    assert counts(prefill, "prompt_tokens") > before


def _read_tokens(events: Iterator[Mapping[str, Any]], into: list[int]) -> None:
    for event in events:
        into += event["choices"][0]["token_ids"]


def _assert_right(nodes: Nodes, prompts: Sequence[str], replies: Sequence[Reply]) -> None:
    assert [reply.status for reply in replies] == [200] * len(prompts), [reply.body for reply in replies]
    for prompt, reply in zip(prompts, replies, strict=True):
        nodes.assert_right(prompt, reply.token_ids, MAX_TOKENS)
