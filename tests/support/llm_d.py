"""Send to two nodes what the P/D sidecar of llm-d would send: replayed from its source, without Go and
without a cluster.

The version is llm-d-router v0.10.0 with `--kv-connector=nixlv2` (`pkg/sidecar/proxy/connector_nixlv2.go`).
The sidecar stands beside a decode node. The header `x-prefiller-host-port` of a request names the prefill
node to ask first.
"""

from __future__ import annotations

import http.client
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from kvferry.lab.client import events_of

VERSION = "v0.10.0"
PREFILL_HEADER = "x-prefiller-host-port"
REQUEST_ID_HEADER = "x-request-id"
#: What the request for a prefill asks for.
PREFILL_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
#: Limits that are 1 in the request for a prefill, whichever of the two API paths it goes to.
TOKEN_LIMITS = ("max_tokens", "max_completion_tokens")
TIMEOUT_S = 120.0

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Answer:
    """What a node answered."""

    status: int
    headers: Mapping[str, str]
    payload: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.payload)

    @property
    def events(self) -> list[Any]:
        """The events of a stream that ended with [DONE]."""
        return list(events_of(self.payload.splitlines()))


class Sidecar:
    """The sidecar of one decode node.

    Attributes:
        bodies: The bodies it sent, to the prefill node and to the decode node in turn.
        answers: What they answered.
    """

    def __init__(self, decode: str) -> None:
        self._decode = decode
        self.bodies: list[bytes] = []
        self.answers: list[Answer] = []

    def post(self, path: str, request: Mapping[str, Any], headers: Headers) -> Answer:
        """Answer a client's request.

        Args:
            headers: Of the client's request, after llm-d's gateway has added the prefill node to them.
        """
        prefill = [value for name, value in headers if name == PREFILL_HEADER]
        headers = [(name, value) for name, value in headers if name != PREFILL_HEADER]
        body = json.loads(go_json(request))
        if not prefill:
            return self._send(self._decode, path, body, headers)
        # It adds a header to those of the client, which may have sent one of this name.
        headers = [*headers, (REQUEST_ID_HEADER, str(uuid.uuid1()))]
        short = {key: value for key, value in body.items() if key != "stream_options"}
        short |= {"stream": False, "kv_transfer_params": PREFILL_PARAMS, **dict.fromkeys(TOKEN_LIMITS, 1)}
        prefilled = self._send(prefill[0], path, short, headers)
        if prefilled.status >= 300:
            return prefilled
        # `null` if the prefill node offered nothing.
        params = json.loads(go_json(prefilled.body)).get("kv_transfer_params")
        return self._send(self._decode, path, {**body, "kv_transfer_params": params}, headers)

    def _send(self, node: str, path: str, body: Mapping[str, Any], headers: Headers) -> Answer:
        raw = go_json(body)
        self.bodies.append(raw)
        connection = http.client.HTTPConnection(node, timeout=TIMEOUT_S)
        try:
            connection.putrequest("POST", path, skip_accept_encoding=True)
            for name, value in (
                *headers,
                ("x-forwarded-for", "127.0.0.1"),
                ("content-length", str(len(raw))),
            ):
                connection.putheader(name, value)
            connection.endheaders(raw)
            with connection.getresponse() as response:
                headers = [(name.lower(), value) for name, value in response.getheaders()]
                self.answers.append(Answer(response.status, dict(headers), response.read()))
                return self.answers[-1]
        finally:
            connection.close()


def go_json(value: Any) -> bytes:
    """Return JSON as Go writes it after it has read it into a map.

    Keys are sorted, every number has become a 64-bit float, and `<`, `>` and `&` are escaped.
    """
    text = json.dumps(_as_floats(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return re.sub("[<>&]", lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def _as_floats(value: Any) -> Any:
    match value:
        case dict():
            return {key: _as_floats(item) for key, item in value.items()}
        case list():
            return [_as_floats(item) for item in value]
        case bool() | None | str():
            return value
        case _:
            number = float(value)
            # Go writes a whole number without a point, with the fewest digits that give the same float.
            return int(Decimal(repr(number))) if number.is_integer() and abs(number) < 1e21 else number
