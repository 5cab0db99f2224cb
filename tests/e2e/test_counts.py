"""What the router counts of real streams whose clients close the connection at `[DONE]`, as every client without keep-alive does."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.support.client import Client, wait_until
from tests.support.patience import DEADLINE_S

NUM_STREAMS = 12


def leave_at_done(router: Client, **body: Any) -> None:
    """Ask for a stream, and close the connection as soon as its last event has arrived."""
    raw = json.dumps({"max_tokens": 4, "temperature": 0, "stream": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", router.process.port), DEADLINE_S) as connection:
        connection.sendall(head.encode() + raw)
        received = b""
        while b"data: [DONE]\n\n" not in received:
            piece = connection.recv(1 << 16)
            assert piece, received
            received += piece


def num_counted(router: Client) -> dict[str, float]:
    lines = router.get("/metrics")[1].decode().splitlines()
    counted = (line for line in lines if line.startswith("kvferry_router_requests_total{"))
    return {line.split('"')[1]: float(line.split()[-1]) for line in counted}


@pytest.mark.full
def test_streams_whose_clients_leave_at_their_last_event_are_all_counted(tiny_fleet: Any) -> None:
    router = tiny_fleet.router
    before = num_counted(router)
    for number in range(NUM_STREAMS):
        leave_at_done(router, prompt=f"{number} " + "words of a prompt " * 8)
    wait_until(lambda: sum(num_counted(router).values()) == sum(before.values()) + NUM_STREAMS)
    assert num_counted(router) == {**before, "200": before.get("200", 0.0) + NUM_STREAMS}
