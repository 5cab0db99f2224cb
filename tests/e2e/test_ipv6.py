"""A pair and its router over IPv6."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from kvferry.lab.servers import Launcher
from tests.support.client import Client, assert_answers_like

PROMPT = "The old ferry sank; the new one has her name and her berth. " * 3
OPTIONS = {"zeromq": {}, "tcp": {"tls": "off"}, "ucx": {}, "shm": None}


@pytest.mark.every_transport
def test_a_pair_hands_over_and_everything_answers_at_an_ipv6_address(
    launcher: Launcher, tiny_single: Client, tiny_arguments: Sequence[str], transport: str
) -> None:
    own = OPTIONS[transport]
    options = (
        ()
        if own is None
        else ("--connector-option", f"transport_options={json.dumps({'bind_host': '::1', **own})}")
    )
    where = ("--host", "::1", "--admin-host", "::1", "--admin-port", "0", "--dev")
    nodes = [
        launcher.start_node(role, role, *tiny_arguments, *options, *where) for role in ("prefill", "decode")
    ]
    prefill, decode = (Client(node.wait_ready(110)) for node in nodes)
    router = Client(launcher.start_router("router", nodes[:1], nodes[1:], *where).wait_ready(30))
    assert all(client.process.url.startswith("http://[::1]:") for client in (prefill, decode, router))
    for client, line in ((prefill, "prefill node ready on"), (router, "router listening on")):
        assert f"{line} {client.process.url}" in client.process.log_tail

    reply = router.complete(PROMPT, max_tokens=4, logprobs=0)
    assert_answers_like(tiny_single, PROMPT, reply.answer, 4)
    assert reply.transfer["num_bytes"]
    assert reply.transfer["transport"] == transport
    assert f'role="decode",url="{decode.process.url}"}} 1.0' in router.get("/metrics")[1].decode()
    assert 'outcome="loaded"} 1.0' in decode.get("/metrics")[1].decode()
