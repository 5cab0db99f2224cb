"""Nodes that restart at the same address: they get another epoch, and the other node finds them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.lab.servers import Launcher
from tests.support.client import Client, assert_answers_like, wait_until

pytestmark = pytest.mark.full

PROMPT = "The old ferry sank; the new one has her name and her berth. " * 3


@pytest.fixture
def address(transport: str, socket_dir: Path) -> str:
    """An address at which a node can listen again after a restart.

    Over a network it is an IPv6 address if possible.
    """
    if transport == "shm":
        return f"shm://{socket_dir}/berth.sock"
    for family, host, written in (
        (socket.AF_INET6, "::1", "[::1]"),
        (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
    ):
        try:
            with socket.create_server((host, 0), family=family) as free:
                return f"{transport}://{written}:{free.getsockname()[1]}"
        except OSError:
            continue
    raise AssertionError("there is no loopback")


@pytest.fixture
def start(launcher: Launcher, tiny_arguments: Sequence[str], address: str) -> Callable[[str], Client]:
    """Start a node with a role. A prefill node always gets the same address."""

    def started(role: str) -> Client:
        where = ("--connector-option", f"address={address}") if role == "prefill" else ()
        return Client(launcher.start_node(role, role, *tiny_arguments, *where).wait_ready(110))

    return started


@pytest.mark.every_transport
def test_either_node_may_be_restarted(start: Callable[[str], Client], tiny_single: Client) -> None:
    prefill, decode = start("prefill"), start("decode")

    def load(index: int, params: dict[str, Any]) -> str:
        """Have the decode node answer a prompt with an offer. Returns why the offer was not loaded."""
        reply = decode.complete(f"{index} {PROMPT}", max_tokens=4, logprobs=0, kv_transfer_params=params)
        assert_answers_like(tiny_single, f"{index} {PROMPT}", reply.answer, 4)
        return str(reply.transfer["error"])

    assert load(0, prefill.offer(f"0 {PROMPT}")) == ""
    stale = prefill.offer(f"1 {PROMPT}")

    prefill.process.kill()
    prefill = start("prefill")
    fresh = prefill.offer(f"2 {PROMPT}")
    assert fresh["remote_addresses"] == stale["remote_addresses"]
    assert fresh["remote_epoch"] != stale["remote_epoch"]
    assert "restarted" in load(1, stale)
    assert load(2, fresh) == ""

    decode.process.kill()
    decode = start("decode")
    assert load(3, prefill.offer(f"3 {PROMPT}")) == ""
    wait_until(decode.is_whole)
