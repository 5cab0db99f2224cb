"""What the router knows of nodes' prefix caches by their KV events: reading them, the index, and what nodes
may do to it.
"""

from __future__ import annotations

import asyncio
import os
import random
import struct
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

from kvferry.connector.p2p.params import KV_EVENTS
from kvferry.router.choice import kv_events
from kvferry.router.choice.fleet import Fleet, Progress
from kvferry.router.choice.kv_events import EventFollower, Follow, MalformedEventError, decode, publisher_of
from kvferry.router.choice.placement import Limits
from kvferry.router.choice.prefixes import (
    MAX_USES_OF_BLOCK,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    Event,
    Prefixes,
    keys_of,
    root_key,
)
from kvferry.router.nodes.pool import UpstreamNode
from kvferry.router.nodes.states import Health, NodeState
from tests.support.patience import DEADLINE_S, until

A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"
BLOCK = 16


def tokens(num: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(50_000) for _ in range(num)] if seed else list(range(num))


def stored(
    hashes: Sequence[int],
    token_ids: Sequence[int],
    parent: int | None = None,
    size: int = BLOCK,
    salt: str = "",
) -> BlocksStored:
    return BlocksStored(hashes, parent, token_ids, size, (0, "GPU"), root_key("", salt))


def removed(*hashes: int) -> BlocksRemoved:
    return BlocksRemoved(hashes, (0, "GPU"))


def shares(prefixes: Prefixes, prompt: str | list[int], **more: str) -> dict[str, float]:
    return dict(prefixes.shares(prefixes.keys_of({"prompt": prompt, **more})))


def text(num: int, seed: int = 0) -> str:
    """Of whole pieces."""
    return "".join(f"{seed:08d}{number:056d}" for number in range(num))


# -- reading -----------------------------------------------------------------------------------------


def packed(*events: Any) -> bytes:
    return bytes(msgpack.packb([1.5, list(events), 0]))


def test_events_are_read_as_maps_and_as_arrays():
    as_map = {
        "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": b"p", "token_ids": [5] * 32,
        "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0, "new": [1],
    }  # fmt: skip
    as_array = ["BlockStored", [1, 2], b"p", [5] * 32, 16, None, "GPU"]
    expected: list[Event] = [stored([1, 2], [5] * 32, b"p")]  # type: ignore[arg-type]
    assert decode(packed(as_map)) == decode(packed(as_array)) == expected
    told = packed(["BlockRemoved", [3]], {"type": "AllBlocksCleared"}, ["AllBlocksCleared"], ["Unknown", 1])
    assert decode(told) == [BlocksRemoved([3], (0, "")), AllCleared(), AllCleared()]


@pytest.mark.parametrize(
    ("more", "root"),
    [
        ({}, root_key("", "")),
        ({"extra_keys": [["salt"], None]}, root_key("", "salt")),
        ({"extra_keys": ["salt", None]}, root_key("", "salt")),
        ({"lora_id": 1, "lora_name": "poet", "extra_keys": [["poet", "salt"], ["poet"]]}, root_key("poet", "salt")),
        ({"lora_id": 1, "lora_name": "poet"}, root_key("poet", "")),
        ({"lora_id": 1}, None),
        ({"extra_keys": [[["image", 0]], None]}, None),
        ({"extra_keys": [None, ["late"]]}, None),
        ({"extra_keys": [None]}, None),
        ({"extra_keys": [[b"digest"], None]}, None),
    ],
    ids=range(10),  # the keys differ from process to process
)  # fmt: skip
def test_adapter_and_salt_are_told_apart_and_images_are_left_out(more: dict[str, Any], root: int | None):
    event = {"type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None, "block_size": 16}
    (told,) = decode(packed({**event, "token_ids": [5] * 32, **more}))
    assert isinstance(told, BlocksStored)
    assert told.root == root


GOOD: dict[str, Any] = {
    "type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [1] * 16, "block_size": 16,
}  # fmt: skip
BAD_EVENTS: list[Any] = [
    5, None, "BlockStored", [], [[]],
    *({**GOOD, key: value} for key, value in [
        ("block_hashes", 5), ("block_hashes", [True]), ("block_hashes", [b"x" * 65]), ("block_hashes", [1.5]),
        ("parent_block_hash", "p"), ("token_ids", None), ("block_size", 0), ("block_size", 1 << 40),
        ("block_size", "16"), ("block_size", True),
    ]),
    ["BlockRemoved"], ["BlockRemoved", 7],
]  # fmt: skip


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, msgpack.packb(7), msgpack.packb([1.0]),
        msgpack.packb([1.0, 5]), msgpack.packb({"a": 1}), b"\x93\x01\x91\x81\x91\x01\x01\xc0",
        *(packed(event) for event in BAD_EVENTS if event not in ([[]], )),
    ],
    ids=lambda payload: repr(payload[:24]),
)  # fmt: skip
def test_what_is_no_batch_is_refused(payload: bytes):
    with pytest.raises(MalformedEventError):
        decode(payload)


def test_any_bytes_are_read_or_refused():
    draw, good = random.Random(7), bytearray(packed(GOOD, ["BlockRemoved", [1, b"2"], "GPU", 0]))
    for _ in range(3000):
        mutated = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            mutated[draw.randrange(len(mutated))] = draw.randrange(256)
        prefixes = Prefixes(max_keys=100)
        try:
            prefixes.apply(A, decode(bytes(mutated)))
        except MalformedEventError:
            continue
        assert len(prefixes) <= 100


@pytest.mark.parametrize(
    "said",
    [
        5, [], {}, {"port": 0}, {"port": 70000}, {"port": True}, {"port": "5557"}, {"port": 5, "replay_port": -1},
        {"port": 5, "topic": 7}, {"port": 5, "topic": "x" * 1000}, {"port": 5, "models": "m"},
        {"port": 5, "models": ["m"] * 1000},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_publisher_is_not_followed(said: Any):
    assert publisher_of("http://127.0.0.1:8000", said) is None


def test_a_node_can_only_name_a_port_of_its_own_host():
    publisher = publisher_of(
        "http://[::1]:8000", {"port": 5557, "host": "elsewhere", "endpoint": "tcp://elsewhere:1"}
    )
    assert publisher is not None
    assert (publisher.host, publisher.port) == ("::1", 5557)


# -- token ids ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 32, 128])
def test_a_prompt_of_token_ids_is_known_by_what_the_node_stored_and_no_longer(size: int):
    prefixes, prompt = Prefixes(), tokens(1024)
    num = 512 // size
    prefixes.apply(A, [stored(range(num), prompt[:512], size=size)])
    assert shares(prefixes, prompt) == {A: 0.5}
    prefixes.apply(A, [stored(range(num, 2 * num), prompt[512:], parent=num - 1, size=size)])
    assert shares(prefixes, prompt) == {A: 1.0}
    prefixes.add(keys_of({"prompt": prompt}), A)  # it was sent there, which says nothing beyond the events
    prefixes.apply(A, [removed(2 * num - 1)])
    assert shares(prefixes, prompt) == {A: 1 - size / 1024}
    prefixes.apply(A, [removed(*range(2 * num))])
    assert shares(prefixes, prompt) == {}
    assert len(prefixes) == 0


def test_the_index_does_not_depend_on_the_engines_hashes():
    prefixes, prompt = Prefixes(), tokens(64)
    prefixes.apply(A, [stored([1, 2, 3, 4], prompt)])
    prefixes.apply(B, [BlocksStored([b"x", b"y"], None, prompt[:32], 16, (0, "GPU"), root_key("", ""))])
    assert shares(prefixes, prompt) == {A: 1.0, B: 0.5}


def test_models_and_salts_share_nothing_but_the_names_of_one_model_are_one():
    prefixes, prompt = Prefixes(), tokens(64)
    prefixes.own_models[A] = frozenset({"base", "alias"})
    prefixes.apply(A, [stored([1, 2, 3, 4], prompt), stored([5, 6], prompt[:32], salt="s")])
    for model in ("", "base", "alias"):
        assert shares(prefixes, prompt, model=model) == {A: 1.0}
    assert shares(prefixes, prompt, model="adapter") == {}
    assert shares(prefixes, prompt, cache_salt="s") == {A: 0.5}
    assert shares(prefixes, prompt, cache_salt="t") == {}


def test_a_block_is_gone_when_its_last_place_has_removed_it():
    prefixes, prompt = Prefixes(), tokens(32)
    for place in ((0, "GPU"), (0, "CPU"), (1, "GPU")):
        prefixes.apply(A, [BlocksStored([1, 2], None, prompt, 16, place, root_key("", ""))])
    prefixes.apply(A, [BlocksRemoved([1, 2], (0, "GPU")), BlocksRemoved([1, 2], (1, "GPU"))])
    assert shares(prefixes, prompt) == {A: 1.0}
    prefixes.apply(A, [BlocksRemoved([1, 2], (0, "CPU"))])
    assert shares(prefixes, prompt) == {}


def test_blocks_whose_beginning_is_not_known_are_not_taken_for_other_prompts():
    prefixes, prompt = Prefixes(), tokens(64)
    prefixes.apply(A, [stored([3, 4], prompt[32:], parent=2)])
    assert shares(prefixes, prompt) == shares(prefixes, prompt[32:]) == {}
    prefixes.apply(A, [stored([1, 2, 3, 4], prompt)])  # said again, with its beginning
    assert shares(prefixes, prompt) == {A: 1.0}


def test_a_cleared_cache_is_forgotten_and_the_node_is_still_followed():
    prefixes = Prefixes()
    for num in (4, 20_000):  # few blocks are taken away one by one
        for number in range(num // 4):
            prompt = tokens(64, seed=number + 1)
            prefixes.apply(A, [stored(range(4 * number, 4 * number + 4), prompt)])
        assert shares(prefixes, prompt) == {A: 1.0}
        prefixes.apply(A, [AllCleared()])
        assert shares(prefixes, prompt) == {}
        assert prefixes.num_blocks(A) == 0


# -- texts -------------------------------------------------------------------------------------------


def test_a_text_is_forgotten_with_the_first_block_that_was_stored_for_it():
    prefixes = Prefixes()
    prefixes.apply(A, [stored([1], tokens(16))])
    mark = prefixes.mark(A)
    prefixes.apply(A, [stored([10, 11], tokens(32, 1))])
    prefixes.add(keys_of({"prompt": text(8)}), A, mark)
    assert shares(prefixes, text(8)) == {A: 1.0}
    prefixes.apply(
        A, [stored([12], tokens(16, 2), parent=11)]
    )  # this batch was under way when the answer came
    prefixes.apply(A, [stored([20], tokens(16, 3))])  # and this one is another request's
    prefixes.apply(A, [removed(1, 20)])
    assert shares(prefixes, text(8)) == {A: 1.0}
    prefixes.apply(A, [removed(12)])
    assert shares(prefixes, text(8)) == {}
    prefixes.apply(A, [removed(10, 11)])
    assert len(prefixes) == 0


def test_a_text_that_was_used_again_ends_with_its_latest_use():
    prefixes = Prefixes()
    prefixes.apply(A, [])
    for number, length in enumerate((4, 8)):
        mark = prefixes.mark(A)
        prefixes.apply(A, [stored([number], tokens(16, number + 1))])
        prefixes.add(keys_of({"prompt": text(length)}), A, mark)
        prefixes.apply(A, [])
    prefixes.apply(A, [removed(0)])  # an engine removes what was used last at the end
    assert shares(prefixes, text(8)) == {A: 1.0}
    prefixes.apply(A, [removed(1)])
    assert shares(prefixes, text(8)) == {}


def test_a_text_that_the_node_had_already_does_not_outlive_what_it_stored_last():
    prefixes = Prefixes()
    prefixes.add(keys_of({"prompt": text(4)}), A)
    prefixes.apply(A, [])  # from here on only the events count
    assert shares(prefixes, text(4)) == {}
    prefixes.add(keys_of({"prompt": text(4)}), A, prefixes.mark(A))
    assert shares(prefixes, text(4)) == {}  # nothing is known to be there that it could end with
    prefixes.apply(A, [stored([1, 2], tokens(32))])
    assert shares(prefixes, text(4)) == {A: 1.0}
    prefixes.add(keys_of({"prompt": text(4)}), A, prefixes.mark(A))
    prefixes.apply(A, [stored([3], tokens(16, 1))])
    prefixes.apply(A, [AllCleared()])
    assert shares(prefixes, text(4)) == {}


def test_a_text_for_which_nothing_was_stored_ends_with_the_latest_block_of_before():
    prefixes = Prefixes()
    prefixes.apply(A, [stored([1, 2], tokens(32))])
    prefixes.add(keys_of({"prompt": text(4)}), A, prefixes.mark(A))
    assert shares(prefixes, text(4)) == {A: 1.0}
    prefixes.apply(A, [removed(1)])
    assert shares(prefixes, text(4)) == {A: 1.0}
    prefixes.apply(A, [removed(2)])
    assert shares(prefixes, text(4)) == {}


def test_a_bounded_number_of_texts_hangs_on_one_block():
    prefixes = Prefixes()
    prefixes.apply(A, [stored([1], tokens(16))])
    texts = [f"{number:04}" + text(4) for number in range(MAX_USES_OF_BLOCK + 1)]
    for each in texts:
        prefixes.add(keys_of({"prompt": each}), A, prefixes.mark(A))
    assert [shares(prefixes, each) for each in (texts[0], texts[1], texts[-1])] == [{}, {A: 1.0}, {A: 1.0}]


def test_chats_with_other_tools_have_another_beginning():
    messages = [{"role": "user", "content": text(4)}]
    plain, tools = {"messages": messages}, {"messages": messages, "tools": [{"name": text(4)}]}
    assert keys_of(plain)[0] != keys_of(tools)[0]
    assert len(keys_of(plain)) < len(keys_of(tools))


def test_without_events_the_router_guesses_as_before():
    prefixes = Prefixes()
    prefixes.add(keys_of({"prompt": text(4)}), A)
    prefixes.apply(B, [stored([1, 2], tokens(32))])
    prefixes.unfollow(B)
    prefixes.add(keys_of({"prompt": text(4)}), B)
    assert shares(prefixes, text(4)) == {A: 1.0, B: 1.0}
    assert shares(prefixes, tokens(32)) == {}


def test_a_request_binds_its_text_to_what_its_nodes_stored_for_it():
    fleet = Fleet("auto", Limits(), lambda: 0.0)
    progress = Progress(fleet, {"prompt": text(4)})
    progress.is_counted = True
    for url in (A, B):
        fleet.prefixes.apply(url, [stored([0], tokens(16))])
    progress.prompt_asked(A)
    fleet.prefixes.apply(A, [stored([1], tokens(16, 1))])
    progress.prompt_ended(is_computed=True)
    progress.answer_began(B)
    fleet.prefixes.apply(B, [stored([1], tokens(16, 1))])
    progress.ended()
    assert shares(fleet.prefixes, text(4)) == {A: 1.0, B: 1.0}
    fleet.prefixes.apply(A, [removed(0)])
    assert shares(fleet.prefixes, text(4)) == {A: 1.0, B: 1.0}
    fleet.prefixes.apply(A, [removed(1)])
    assert shares(fleet.prefixes, text(4)) == {B: 1.0}
    fleet.prefixes.apply(B, [removed(1)])
    assert shares(fleet.prefixes, text(4)) == {}


# -- bounds ------------------------------------------------------------------------------------------


def test_a_node_that_claims_everything_takes_room_from_no_other():
    prefixes, prompt = Prefixes(max_keys=3000), tokens(320)
    prefixes.apply(B, [stored(range(20), prompt)])
    prefixes.add(keys_of({"prompt": text(20)}), "http://guessed")
    for batch in range(100):
        claimed = tokens(16 * 100, seed=batch + 1)
        prefixes.apply(A, [stored(range(1000 * batch, 1000 * batch + 100), claimed)])
    assert len(prefixes) <= 3000
    assert (prefixes.num_blocks(A) or 0) <= 1000
    assert shares(prefixes, prompt) == {B: 1.0}
    assert shares(prefixes, text(20)) == {"http://guessed": 1.0}


def test_any_order_of_events_and_requests_keeps_the_index_bounded_and_ends_empty():
    draw = random.Random(11)
    for _ in range(30):
        prefixes = Prefixes(max_keys=200)
        marks: dict[str, int] = {}
        for _ in range(400):
            url = draw.choice((A, B, "c"))
            match draw.randrange(6):
                case 0 | 1:
                    first, num = draw.randrange(60), draw.randrange(1, 5)
                    prompt, parent = (
                        tokens(16 * num, draw.randrange(1, 9)),
                        draw.choice((None, draw.randrange(60))),
                    )
                    prefixes.apply(url, [stored(range(first, first + num), prompt, parent)])
                case 2:
                    prefixes.apply(url, [removed(*draw.sample(range(64), 8))])
                case 3:
                    marks[url] = prefixes.mark(url)
                case 4:
                    prefixes.add(keys_of({"prompt": text(9, draw.randrange(5))}), url, marks.get(url))
                case _:
                    draw.choice((prefixes.clear, prefixes.unfollow, prefixes.forget))(url)
            assert len(prefixes) <= 200
        for url in (A, B, "c"):
            prefixes.apply(url, [stored([0], tokens(16))])
            prefixes.apply(url, [removed(*range(64))])
        for seed in range(5):
            assert shares(prefixes, text(9, seed)) == {}
        for seed in range(1, 9):
            assert shares(prefixes, tokens(64, seed)) == {}


# -- over the wire -----------------------------------------------------------------------------------


@dataclass
class Source:
    """A publisher that says what a test tells it to, with pyzmq's sockets."""

    publisher: zmq.asyncio.Socket
    replays: zmq.asyncio.Socket
    said: dict[str, Any]
    kept: list[tuple[int, bytes]] = field(default_factory=list)
    num_replays: int = 0

    async def send(self, number: int, payload: bytes) -> None:
        self.kept.append((number, payload))
        await self.publisher.send_multipart([b"kv", number.to_bytes(8, "big"), payload])

    async def serve_replays(self) -> None:
        while True:
            client, _, first = await self.replays.recv_multipart()
            self.num_replays += 1
            for number, payload in self.kept:
                if number >= int.from_bytes(first, "big"):
                    await self.replays.send_multipart(
                        [client, b"", b"kv", number.to_bytes(8, "big"), payload]
                    )
            await self.replays.send_multipart([client, b"", b"", b"\xff" * 8, b""])


@asynccontextmanager
async def source(*, with_replay: bool = True) -> AsyncIterator[Source]:
    context = zmq.asyncio.Context()
    sockets = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
    replay = {"replay_port": ports[1]} if with_replay else {}
    made = Source(*sockets, {"port": ports[0], "topic": "k", "models": ["m"], **replay})
    serving = asyncio.create_task(made.serve_replays())
    try:
        yield made
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        context.destroy(linger=0)


def described(events: Any) -> Health:
    """Return what a node says of itself that publishes its events there."""
    return Health(NodeState.READY, description={KV_EVENTS: events})


@asynccontextmanager
async def following(*said: Any, follow: Follow = "auto", host: str = "127.0.0.1") -> AsyncIterator[Prefixes]:
    prefixes = Prefixes()
    follower = EventFollower(prefixes, follow)
    nodes = []
    for number, each in enumerate(said):
        nodes.append(UpstreamNode("prefill", f"http://{host}:{number + 1}"))
        nodes[-1].said = described(each)
    task = asyncio.create_task(follower.run(lambda: nodes))
    try:
        yield prefixes
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def batch(number: int, parent: int | None = None, prompt: list[int] | None = None) -> bytes:
    """One block."""
    return packed(
        {**GOOD, "block_hashes": [number], "parent_block_hash": parent, "token_ids": prompt or [number] * 16}
    )


async def test_events_are_followed_from_the_first_one_that_the_node_still_has():
    async with source() as node:
        await node.send(0, batch(0))
        await node.send(1, batch(1, parent=0))
        async with following(node.said) as prefixes:
            await until(lambda: prefixes.num_blocks(A) == 2)
            assert shares(prefixes, [0] * 16 + [1] * 16, model="m") == {A: 1.0}
            await node.publisher.recv()  # the subscription
            await node.send(2, packed(["BlockRemoved", [1]]))
            await until(lambda: prefixes.num_blocks(A) == 1)


async def test_lost_events_are_asked_for_again():
    async with source() as node:
        async with following(node.said) as prefixes:
            await node.publisher.recv()
            await node.send(0, batch(0))
            await until(lambda: prefixes.num_blocks(A) == 1)
            node.kept += [(1, batch(1, parent=0)), (2, batch(2, parent=1))]  # lost on the way
            await node.send(3, batch(3, parent=2))
            await until(lambda: prefixes.num_blocks(A) == 4)
            assert shares(prefixes, [*[0] * 16, *[1] * 16, *[2] * 16, *[3] * 16]) == {A: 1.0}


@pytest.mark.parametrize("numbers", [(5, 7), (5, 5), (5, 3), (5, 0), (5, (1 << 64) - 1)], ids=str)
async def test_a_wrong_number_makes_the_router_forget_what_the_node_had(
    numbers: tuple[int, int], caplog: Any
):
    async with source(with_replay=False) as node, following(node.said) as prefixes:
        await node.publisher.recv()
        await node.send(numbers[0], batch(1))
        await until(lambda: prefixes.num_blocks(A) == 1)
        await node.send(numbers[1], batch(2))
        await until(lambda: shares(prefixes, [2] * 16) == {A: 1.0})
        assert shares(prefixes, [1] * 16) == {}
    assert sum("lost KV events" in record.message for record in caplog.records) == 1


async def test_a_lost_connection_makes_the_router_guess_again_and_come_back():
    async with source(with_replay=False) as node, following(node.said) as prefixes:
        await node.publisher.recv()
        await node.send(0, batch(1))
        await until(lambda: prefixes.num_blocks(A) == 1)
        endpoint = node.publisher.getsockopt_string(zmq.LAST_ENDPOINT)
        node.publisher.unbind(endpoint)
        node.publisher.close(linger=0)
        await until(lambda: prefixes.num_blocks(A) is None)
        node.publisher = zmq.asyncio.Context.instance().socket(zmq.XPUB)
        try:
            node.publisher.bind(endpoint)
            await node.publisher.recv()
            await node.send(0, batch(2))
            await until(lambda: shares(prefixes, [2] * 16) == {A: 1.0})
            assert shares(prefixes, [1] * 16) == {}
        finally:
            zmq.asyncio.Context.instance().destroy(linger=0)


async def test_one_nodes_garbage_ends_nothing_and_is_logged_once(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kv_events, "LONGEST_PAUSE_S", 0.01)
    async with source(with_replay=False) as bad, source(with_replay=False) as good:
        async with following(bad.said, good.said) as prefixes:
            await good.publisher.recv()
            for number in range(20):
                await bad.publisher.recv()  # it has come back
                await bad.publisher.send_multipart(
                    [b"kv", b"12345678"[: number % 9], os.urandom(number * 50)]
                )
            await good.send(0, batch(1))
            await until(lambda: prefixes.num_blocks(B) == 1)
            assert prefixes.num_blocks(A) is None
    assert sum(A in record.message for record in caplog.records) == 1


async def hostile_server(stop: asyncio.Event, *chunks: bytes, endless: bytes = b"") -> asyncio.Server:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for chunk in chunks:
                writer.write(chunk)
            while endless and not stop.is_set():
                writer.write(endless)
                await writer.drain()
            await stop.wait()
        except ConnectionError:
            pass
        finally:
            writer.transport.abort()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


GREETING = kv_events._GREETING
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"


@pytest.mark.parametrize(
    ("chunks", "endless"),
    [
        ((b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4,), b""),
        ((GREETING.replace(b"NULL\0", b"PLAIN"),), b""),
        ((GREETING, b"\x00\x01x"), b""),
        ((GREETING, READY, struct.pack(">BQ", 2, 1 << 62)), b""),
        ((GREETING, READY), b"\x01\x00" * 1000),  # a message of endless frames
        ((GREETING, READY), struct.pack(">BQ", 3, 1 << 19) + bytes(1 << 19)),
        ((GREETING, READY), b"\x04\x00" * 1000),  # endless commands
    ],
    ids=["http", "plain", "no-command", "huge-frame", "many-frames", "large-message", "commands"],
)
async def test_a_publisher_that_breaks_the_protocol_harms_only_itself(
    chunks: tuple[bytes, ...], endless: bytes
):
    stop = asyncio.Event()
    server = await hostile_server(stop, *chunks, endless=endless)
    said = {"port": server.sockets[0].getsockname()[1]}
    try:
        async with source(with_replay=False) as good, following(said, good.said) as prefixes:
            await good.publisher.recv()
            await good.send(0, batch(1))
            await until(lambda: prefixes.num_blocks(B) == 1)
            assert prefixes.num_blocks(A) is None
    finally:
        stop.set()
        server.close()
        await server.wait_closed()


async def test_a_flood_of_events_leaves_the_router_its_time():
    flood = packed(*({**GOOD, "block_hashes": [number]} for number in range(3000)))
    message = b"\x01\x00\x01\x08" + bytes(8) + struct.pack(">BQ", 2, len(flood)) + flood
    stop = asyncio.Event()
    server = await hostile_server(stop, GREETING, READY, endless=message)
    try:
        async with following({"port": server.sockets[0].getsockname()[1]}) as prefixes:
            await until(lambda: bool(prefixes.num_blocks(A)))
            num_turns, began_s = 0, time.thread_time()
            end_s = asyncio.get_running_loop().time() + 2.0
            while asyncio.get_running_loop().time() < end_s:
                await asyncio.sleep(0.001)
                num_turns += 1
            assert num_turns > 200
            assert time.thread_time() - began_s < 1.0
    finally:
        stop.set()
        server.close()
        await server.wait_closed()


async def test_by_default_only_nodes_on_loopback_are_followed():
    async with source() as node:
        await node.send(0, batch(0))
        for follow, host, is_followed in [("auto", "10.0.0.1", False), ("off", "127.0.0.1", False)]:
            async with following(node.said, follow=follow, host=host) as prefixes:  # type: ignore[arg-type]
                await asyncio.sleep(2 * kv_events.LOOK_S)
                assert bool(prefixes.followed) is is_followed
        assert node.num_replays == 0
        async with following(node.said, follow="on") as prefixes:
            await until(lambda: prefixes.num_blocks(A) == 1)


async def test_a_restarted_node_is_forgotten_and_followed_anew():
    async with source() as node:
        await node.send(0, batch(0))
        prefixes = Prefixes()
        follower, upstream = EventFollower(prefixes, "auto"), UpstreamNode("prefill", A)
        upstream.said = described(node.said)
        task = asyncio.create_task(follower.run(lambda: [upstream]))
        try:
            await until(lambda: prefixes.num_blocks(A) == 1)
            node.kept = [(0, batch(5))]
            prefixes.forget(A)
            follower.restart(A)
            await until(lambda: shares(prefixes, [5] * 16) == {A: 1.0})
            assert shares(prefixes, [0] * 16) == {}
            upstream.said = described({})  # the next one publishes nothing
            await until(lambda: not prefixes.followed)
            assert shares(prefixes, [5] * 16) == {}
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_command_between_the_frames_of_a_message_is_no_part_of_it():
    """A ZeroMQ socket with heartbeats sends them at any time."""
    ready, ping = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB", b"\x04PING\x00\x01"

    async def publish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(64))  # the greeting, which has no name of its own
        for flags, frame in ((4, ready), (4, ping), (1, b"topic"), (4, ping), (0, b"payload")):
            writer.write(bytes((flags, len(frame))) + frame)
        await reader.read()
        writer.close()

    async with asyncio.timeout(DEADLINE_S), await asyncio.start_server(publish, "127.0.0.1", 0) as server:
        connection = await kv_events._Connection.open(*server.sockets[0].getsockname(), b"SUB")
        assert await connection.receive() == [b"topic", b"payload"]
        connection.close()
