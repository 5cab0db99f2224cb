"""Everything that reads bytes of a stranger, in one table, each with the errors that it promises.

A decoder may refuse its input with one of these errors. Any other exception, a hang or much memory is a
defect.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.cli import config_file
from kvferry.cli.errors import CommandError
from kvferry.cli.main import commands_of, make_parser
from kvferry.connector.handoff import messages
from kvferry.connector.p2p.params import parse_transfer_params
from kvferry.lab.engine.errors import InvalidRequestError
from kvferry.lab.node.openai_request import parse_chat, parse_completion
from kvferry.router.choice import kv_events
from kvferry.router.http.errors import ApiError
from kvferry.router.http.json_body import parse_json
from kvferry.router.http.sse import Splitter
from kvferry.router.nodes import membership
from kvferry.transports.errors import KVTransferError
from kvferry.transports.nixl import wire as nixl
from kvferry.transports.shm import hello as shm
from kvferry.transports.sums import sum_of
from kvferry.transports.tcp import wire as tcp
from kvferry.transports.ucx import wire as ucx
from kvferry.transports.zeromq import wire as zeromq

CORPUS = Path(__file__).parent / "corpus"
MAX_EVENT_BYTES = 1 << 12


@dataclass(frozen=True)
class Decoder:
    """What reads bytes of a stranger.

    Attributes:
        read: Reads them, or raises one of `errors`.
        whose: Whose bytes they are.
    """

    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    whose: str


def _framed(decode: Callable[[int, bytes], object]) -> Callable[[bytes], object]:
    """For transports with frames of a kind and a body. The sums of frames are checked before."""
    return lambda data: decode(data[0], data[1:]) if data else None


def _zeromq(data: bytes) -> object:
    # The first byte says where the head ends. Its sum is right, because otherwise nothing else would be
    # tried: that of the head alone in a slice, the first byte of which is 4, and of all bytes otherwise.
    length = data[0] % 64 if data else 0
    head, body = data[1 : 1 + length], data[1 + length :]
    summed = head if head[:1] == b"\x04" else head + body
    return zeromq.decode([head + sum_of(summed), body])  # type: ignore[list-item]  # bytes are as good as frames


def _params(data: bytes) -> object:
    try:
        params = json.loads(data)
    except (ValueError, RecursionError):
        return None  # no body of a request, so it is refused before
    return parse_transfer_params(params)


def _body(data: bytes) -> object:
    body = parse_json(data)
    return (parse_chat if "messages" in body else parse_completion)(body)


def _events(data: bytes) -> object:
    splitter = Splitter(MAX_EVENT_BYTES)
    events = [*splitter.add(data[: len(data) // 2]), *splitter.add(data[len(data) // 2 :]), *splitter.rest()]
    return [(event.content, event.is_done) for event in events]


_PARSER: list[Any] = []


def _configuration(data: bytes) -> object:
    try:
        tables = tomllib.loads(data.decode())
    except (ValueError, RecursionError):
        return None  # as `config_file.read` refuses it
    if not _PARSER:
        _PARSER.append(commands_of(make_parser(with_options=("router",))))
    config_file.apply(tables, _PARSER[0], "router")
    return None


#: Name → what reads bytes of a stranger.
DECODERS: Mapping[str, Decoder] = {
    "handoff": Decoder(messages.decode, (KVTransferError,), "another node: messages of the handoff protocol"),
    "shm": Decoder(shm.decode_hello, (KVTransferError,), "another process of this user"),
    "tcp": Decoder(_framed(tcp.decode), (KVTransferError,), "another node: frames of tcp"),
    "ucx": Decoder(_framed(ucx.decode), (KVTransferError,), "another node: frames of ucx"),
    "nixl": Decoder(_framed(nixl.decode), (KVTransferError,), "another node: frames of nixl"),
    "zeromq": Decoder(_zeromq, (KVTransferError,), "another node: messages of zeromq"),
    "params": Decoder(_params, (KVTransferError,), "a client: kv_transfer_params"),
    "body": Decoder(_body, (ApiError, InvalidRequestError), "a client: the body of a request"),
    "kv-events": Decoder(kv_events.decode, (kv_events.MalformedEventError,), "an engine: its KV events"),
    "stream": Decoder(_events, (ValueError,), "a node: the stream of an answer"),
    "nodes-json": Decoder(
        lambda data: membership.parse_nodes(data, is_json=True),
        (membership.BadNodesError,),
        "an operator's program",
    ),
    "nodes-toml": Decoder(
        lambda data: membership.parse_nodes(data, is_json=False), (membership.BadNodesError,), "an operator"
    ),
    "configuration": Decoder(_configuration, (CommandError,), "a user: the configuration file"),
}


def try_decoder(name: str, data: bytes) -> None:
    """Let a decoder read some bytes. Whatever it raises beyond what it promises is a defect."""
    decoder = DECODERS[name]
    try:
        decoder.read(data)
    except decoder.errors:
        pass
