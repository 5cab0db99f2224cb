"""Three `vllm serve` processes behind the router: answers outlive their decode server, completions and chats
alike.

KVFERRY_LOSSES is how many servers are frozen; a quarter as many are killed, because a start takes half a
minute.
"""

from __future__ import annotations

import itertools
from operator import attrgetter

import pytest

from kvferry.lab.servers import run_program
from tests.support.chaos.services import Service
from tests.support.losses import NUM_LOSSES, SEED, START_S, Fleet, learn, lose_nodes
from tests.support.vllm_servers import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 + 60 * NUM_LOSSES)]

NUM_KILLS = -(-NUM_LOSSES // 4)
CHECKS = ("--check-interval-s", "0.3", "--check-timeout-s", "10")
#: For servers that are frozen. One that is busy answers later than a small reference node.
IMPATIENT = ("--check-timeout-s", "3")
NUM_TOKENS = 250
NUM_QUESTIONS = 10
TEXT = "A ferry that sinks leaves its cargo to the next one. " * 3
USAGE = {"stream_options": {"include_usage": True}, "stream": True}
STREAMS = (
    {"prompt": TEXT, "stream": True},
    {"messages": TEXT, **USAGE},
    {"prompt": TEXT, **USAGE, "repetition_penalty": 1.1},
    {"prompt": [65, 66, 67] * 40, "stream": True},
)
#: A whole answer does not move. If its server is lost, another one computes it anew.
BODIES = (*STREAMS, {"prompt": TEXT, "return_token_ids": True})
LOADS = "kvferry_load_seconds_count"


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    """In place of the check of each test: the servers are the session's, and a test starts those anew that it
    has killed.
    """


@pytest.fixture(scope="module")
def questions(served):
    """Questions with one right answer each."""
    return list(itertools.islice(_learned(served[0]), NUM_QUESTIONS))


def _learned(server):
    for number in itertools.count():
        if question := learn(server.process, *asked(number)):
            yield question


def asked(number, bodies=BODIES, **more):
    """Return the path and the body of a request for an answer."""
    body = {"model": "model", "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    body |= {**bodies[number % len(bodies)], **more}
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": f"{number} {TEXT}"}]
        return "/v1/chat/completions", body
    prompt = body["prompt"]
    body["prompt"] = f"{number} {prompt}" if isinstance(prompt, str) else [number, *prompt]
    return "/v1/completions", body


@pytest.mark.parametrize(("kind", "num_losses"), [("freeze", NUM_LOSSES), ("kill", NUM_KILLS)])
def test_answers_outlive_their_decode_server(served, questions, tmp_path, kind, num_losses):
    roles = zip(("--prefill", "--decode", "--decode"), served, strict=True)
    urls = [word for option, server in roles for word in (option, server.process.url)]
    options = (*urls, *CHECKS, *(IMPATIENT if kind == "freeze" else ()))
    with Service("router", run_program, "router", options, tmp_path, tmp_path) as router:
        router.wait_ready(START_S)
        fleet = Fleet(served, served[1:], router, tmp_path / "router (1).log")
        fleet.await_ready()
        report = lose_nodes(fleet, questions, kind, num_losses, attrgetter("num_known"))
    print(f"\nseed {SEED}: {report}")
    assert not report.problems, "\n".join(report.problems)
    assert report.num_known, "no stream went on at another server"
    assert all(Server(server.process).metric(LOADS) > 0 for server in served[1:]), (
        "prompts come from the prefill server"
    )
