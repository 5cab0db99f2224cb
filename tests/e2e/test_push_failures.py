"""Pushes that are cut in the middle: of a prompt's bytes a third is in place and a third on its way when a process dies,
or sleeps past every deadline. Answers stay right, and every block comes back."""

from __future__ import annotations

import http.client
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from reference.demo.launcher import Launcher
from tests.support.client import DO_REMOTE_DECODE, Client, Reply, assert_answers_like, is_stopped, wait_until

pytestmark = pytest.mark.slow

PROMPT = "Half of the crates were on the quay when the harbour master fell asleep. " * 4
MAX_TOKENS = 12
PUSH = ("--connector-option", "transfer=push")
#: The load of a push that is not answered ends after twice this time. Network peers count as alive for longer.
IMPATIENT = ("--connector-option", "read_timeout_s=1.5")
#: A pool of 25 blocks, which one request of this length fills.
SMALL = ("--max-model-len", "400", "--num-blocks", "26")

Start = Callable[..., Client]


@pytest.fixture
def start(launcher: Launcher, tiny_arguments: Sequence[str]) -> Start:
    """Start a node that a test may stop or kill."""

    def started(role: str, *arguments: str) -> Client:
        node = launcher.start_node(role, role, *tiny_arguments, *arguments)
        launcher.wait_ready([node], 110)
        return Client(node)

    return started


@pytest.fixture
def prefill(start: Start, stopping: Callable[[int], Sequence[str]]) -> Client:
    """A prefill node that stops in the middle of its first write."""
    return start("prefill", *stopping(1))


@pytest.fixture(scope="module")
def decode(module_launcher: Launcher, tiny_arguments: Sequence[str]) -> Client:
    """A decode node that is pushed to, and computes what did not come."""
    node = module_launcher.start_node("decode by push", "decode", *tiny_arguments, *PUSH)
    module_launcher.wait_ready([node], 110)
    return Client(node)


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> str:
    """A prompt that no prefix cache knows from an earlier test."""
    return f"{request.node.name}: {PROMPT}"[:330]


def ask(prefill: Client, decode: Client, prompt: str) -> Reply:
    """Prefill on one node, decode on the other."""
    offered = prefill.complete(prompt, max_tokens=1, kv_transfer_params=DO_REMOTE_DECODE)
    params = offered.body["kv_transfer_params"]
    return decode.complete(prompt, max_tokens=MAX_TOKENS, kv_transfer_params=params)


@contextmanager
def cut(prefill: Client, decode: Client, prompt: str) -> Iterator[Future[Reply]]:
    """Ask, and go on when the prefill node has stopped in the middle of its write: the answer that is still to come."""
    with ThreadPoolExecutor(1) as background:
        answer = background.submit(ask, prefill, decode, prompt)
        wait_until(lambda: is_stopped(prefill.process.pid))
        assert not answer.done()
        yield answer


def assert_pushed(prefill: Client, decode: Client, single: Client, prompt: str) -> None:
    """A push comes whole, and leaves nothing behind."""
    reply = ask(prefill, decode, prompt)
    assert_answers_like(single, prompt, reply.token_ids, MAX_TOKENS)
    assert (reply.transfer["error"], reply.transfer["mechanism"][:5]) == ("", "push/")
    wait_until(lambda: prefill.is_whole() and decode.is_whole())


def test_a_producer_that_is_killed_while_it_writes(
    prefill: Client, decode: Client, tiny_single: Client, prompt: str
) -> None:
    num_failed = decode.metric("kvferry_failed_transfers_total")
    with cut(prefill, decode, prompt) as answer:
        prefill.process.kill()
        reply = answer.result()
    assert_answers_like(tiny_single, prompt, reply.token_ids, MAX_TOKENS)
    assert reply.transfer["error"]
    wait_until(decode.is_whole)
    assert decode.metric("kvferry_failed_transfers_total") == num_failed + 1


@pytest.mark.every_transport
def test_a_producer_that_wakes_up_when_its_push_was_given_up_changes_no_block_of_others(
    start: Start, prefill: Client, tiny_single: Client, prompt: str
) -> None:
    decode = start("decode", *PUSH, *IMPATIENT, *SMALL, "--load-failure-policy", "fail")
    with cut(prefill, decode, prompt) as answer:
        failed = answer.result()
    assert (failed.status, failed.body["error"]["code"]) == (500, "generation_failed")
    assert "did not end in time" in failed.error
    wait_until(decode.is_whole)
    other = prompt[::-1]
    owner = decode.complete(other, max_tokens=MAX_TOKENS)
    assert_answers_like(tiny_single, other, owner.token_ids, MAX_TOKENS)
    prefill.process.send_signal(signal.SIGCONT)
    wait_until(prefill.is_whole)
    # What was in those blocks before it woke up is there still: the same answer comes from the prefix cache.
    again = decode.complete(other, max_tokens=MAX_TOKENS)
    assert again.token_ids == owner.token_ids
    assert again.body["metrics"]["num_cached_tokens"] >= len(other) - 16
    assert decode.metric("kvferry_failed_transfers_total") == 1
    assert_pushed(prefill, decode, tiny_single, prompt.upper())


def test_a_consumer_that_is_killed_while_it_is_written_to(
    start: Start, prefill: Client, decode: Client, tiny_single: Client, prompt: str
) -> None:
    mortal = start("decode", *PUSH)
    with cut(prefill, mortal, prompt) as answer:
        mortal.process.kill()
        assert isinstance(answer.exception(), ConnectionError | http.client.HTTPException)
    prefill.process.send_signal(signal.SIGCONT)
    wait_until(prefill.is_whole, timeout_s=15)  # its lease is 30 s
    assert_pushed(prefill, decode, tiny_single, prompt)
