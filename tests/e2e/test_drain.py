"""Stopping nodes: they finish the answers that they began, release what they hold for others, and exit in
time.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.lab.servers import Launcher, Spawn
from tests.support.client import Client, streamed_answer, wait_until

pytestmark = pytest.mark.slow

START_TIMEOUT_S = 110.0
DRAIN_S = 40.0
#: Seconds for a node to end on a busy machine, once it has nothing left to wait for.
END_S = 20.0
LONG = {"max_tokens": 300, "ignore_eos": True, "logprobs": 0}
PROMPT = (
    "The last ferry of the day takes everyone who waits at the pier, and only then the crew goes home. " * 2
)
OTHER_PROMPT = PROMPT[::-1]


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Run two processes, each of which keeps a core busy."""
    context = multiprocessing.get_context("spawn")
    burners = [context.Process(target=_burn, daemon=True) for _ in range(2)]
    for burner in burners:
        burner.start()
    yield
    for burner in burners:
        burner.kill()
        burner.join()
        burner.close()


def _burn() -> None:
    while True:
        pass


@pytest.fixture
def start(launcher: Launcher, tiny_arguments: Sequence[str]) -> Callable[..., Client]:
    """Start a node with a role and its own options."""

    def started(role: str, *arguments: str) -> Client:
        node = launcher.start_node(role, role, *tiny_arguments, *arguments).wait_ready(START_TIMEOUT_S)
        return Client(node)

    return started


def is_draining(client: Client) -> bool:
    return client.get("/ready") == (503, b'{"status": "draining"}')


def retry_after(client: Client) -> str | None:
    """Return the `Retry-After` header of a request that is refused with 503."""
    reply = client.post("/v1/completions", {"prompt": "too late"})
    assert reply.status == 503
    assert "node is stopping" in reply.error
    return reply.headers.get("Retry-After")


@pytest.mark.usefixtures("busy_machine")
@pytest.mark.timeout(300)
def test_nodes_that_drain_on_a_busy_machine_finish_their_answers_and_deliver_their_offers(
    start: Callable[..., Client], tiny_single: Client
) -> None:
    arguments = ("--drain-timeout-s", f"{DRAIN_S:g}")
    prefill, decode = start("prefill", *arguments), start("decode", *arguments)
    expected = tiny_single.complete(PROMPT, **LONG).answer
    other_expected = tiny_single.complete(OTHER_PROMPT, max_tokens=4, logprobs=0).answer
    held = prefill.offer(OTHER_PROMPT)
    taken = prefill.offer(PROMPT)
    with (
        ThreadPoolExecutor(1) as background,
        decode.streaming(PROMPT, kv_transfer_params=taken, **LONG) as events,
    ):
        first = next(events)
        whole = background.submit(decode.complete, PROMPT, **LONG)
        wait_until(lambda: decode.metric("kvferry_engine_running_requests") == 2)
        prefill.process.terminate()
        wait_until(lambda: is_draining(prefill))
        assert retry_after(prefill) == "1"
        # An offer is delivered while its node is draining.
        late = decode.complete(OTHER_PROMPT, max_tokens=4, logprobs=0, kv_transfer_params=held)
        assert late.answer == other_expected
        assert (late.transfer["error"], late.transfer["num_bytes"] > 0) == ("", True)
        began = time.monotonic()
        decode.process.terminate()
        wait_until(lambda: is_draining(decode))
        assert retry_after(decode) == "1"
        assert streamed_answer([first, *events]) == expected
        assert whole.result().answer == expected
    assert decode.process.wait(DRAIN_S) == 0
    assert prefill.process.wait(END_S) == 0
    assert time.monotonic() - began < DRAIN_S
    assert "aborted" not in prefill.process.log_tail + decode.process.log_tail


def test_requests_left_at_the_deadline_are_aborted_and_their_offers_released_at_once(
    start: Callable[..., Client],
) -> None:
    """The decode node runs one request and queues others, whose offers it has claimed or is about to
    claim.
    """
    prefill = start("prefill")  # with leases of the default length, which is longer than the test waits
    decode = start("decode", "--drain-timeout-s", "0", "--max-num-seqs", "1")
    held = [prefill.offer(f"{index} {PROMPT}") for index in range(3)]
    with ThreadPoolExecutor(3) as background, decode.streaming("0", **LONG) as events:
        next(events)
        waiting = [
            background.submit(decode.complete, f"{index} {PROMPT}", kv_transfer_params=params, **LONG)
            for index, params in enumerate(held)
        ]
        wait_until(lambda: decode.metric("kvferry_engine_waiting_requests") == len(held))
        decode.process.terminate()
        ends = [reply.result() for reply in waiting]
        assert "the node stopped" in list(events)[-1]["error"]["message"]
    assert [reply.status for reply in ends] == [503] * len(held)
    assert decode.process.wait(END_S) == 0
    wait_until(prefill.is_whole, timeout_s=10.0)


def test_a_node_whose_output_cannot_be_written_serves_and_ends_normally(
    spawn: Spawn, tiny_single_arguments: Sequence[str]
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with Launcher(lambda script, arguments, _, link: spawn(script, arguments, full, link)) as launcher:
            node = launcher.start_node("node", "single", *tiny_single_arguments, "--log-level", "debug")
            launcher.wait_ready([node], START_TIMEOUT_S)
            client = Client(node)
            assert client.complete(PROMPT, max_tokens=4).status == 200
            assert client.post("/v1/completions", b"{").status == 400
            assert client.get("/health") == (200, b'{"status": "ok"}')
            node.terminate()
            assert node.wait(END_S) == 0
    finally:
        os.close(full)
