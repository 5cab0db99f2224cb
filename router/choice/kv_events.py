"""Follow the events in which nodes say what their prefix caches store and remove: those of vLLM's ZeroMQ
publisher.

A node says on `/ready`, or in its description, at which port it publishes. The router connects to that port
of the host that it knows the node by, and nowhere else. It speaks ZMTP 3.0 itself, because a ZeroMQ socket
would collect any number of a message's frames in memory before it handed them over.

What must never break: what comes in is not trusted. A message has bounds, a node's events get a bounded share
of the router's time, and whatever is wrong with them only makes the router forget what the node has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import msgpack
from yarl import URL

from ...transports.network import is_loopback
from ..nodes.pool import UpstreamNode
from .prefixes import AllCleared, BlockHash, BlocksRemoved, BlocksStored, Event, Place, Prefixes, root_key

#: Whose events are followed: of nodes on loopback, of all, or of none.
Follow = Literal["auto", "on", "off"]

#: The largest message. A step of 100,000 tokens has less.
MAX_MESSAGE_BYTES = 1 << 20
MAX_FRAMES = 8
#: Bytes of a block hash, and characters of a name.
MAX_HASH_BYTES, MAX_NAME_CHARS = 64, 256
MAX_BLOCK_SIZE = 1 << 16
#: Names of a node's own model.
MAX_MODELS = 64
#: Of the router's time, what one node's events may take.
SHARE_OF_TIME = 0.1
#: About what it takes to receive a message.
MESSAGE_S = 5e-5
#: How often the nodes are looked through for publishers that came or went.
LOOK_S = 0.25
CONNECT_S, HANDSHAKE_S, REPLAY_S = 5.0, 5.0, 10.0
#: Pauses between attempts to connect.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 5.0
#: At most one line per node in this time.
LOG_S = 60.0
#: The number after the last message of a replay.
END_OF_REPLAY = (1 << 64) - 1

logger = logging.getLogger(__name__)


class MalformedEventError(Exception):
    """What a node published is no batch of events."""


# -- what nodes say of their publishers --------------------------------------------------------------


@dataclass(frozen=True)
class Publisher:
    """Where a node publishes.

    Attributes:
        replay_port: Where it sends earlier batches again; 0 if it does not.
        models: Names of its own model.
    """

    host: str
    port: int
    replay_port: int
    topic: str
    models: frozenset[str]


def publisher_of(url: str, said: object) -> Publisher | None:
    """Return where the node at a URL publishes; None if it says nothing that can be understood."""
    host = URL(url).host
    if not isinstance(said, Mapping) or not host:
        return None
    port, replay_port = said.get("port"), said.get("replay_port") or 0
    topic, models = said.get("topic") or "", said.get("models") or []
    if not _is_int(port, 1, 65535) or not _is_int(replay_port, 0, 65535):
        return None
    if not _is_name(topic) or not isinstance(models, list) or len(models) > MAX_MODELS:
        return None
    return Publisher(host, port, replay_port, topic, frozenset(filter(_is_name, models)))


# -- batches -----------------------------------------------------------------------------------------

_FIELDS: Mapping[str, Sequence[str]] = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        *("lora_name", "extra_keys", "group_idx"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


def decode(payload: bytes) -> list[Event]:
    """Read a batch: `[time, events, …]` in MessagePack, each event an array or, since vLLM 0.3x, a map.

    Events of unknown kinds are left out.

    Raises:
        MalformedEventError: It is none.
    """
    try:
        batch = msgpack.unpackb(payload, strict_map_key=False)
    except Exception as error:  # noqa: BLE001 - msgpack has no common class of what it raises for bytes of a stranger
        raise MalformedEventError(f"no MessagePack: {error!r}") from None
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise MalformedEventError("no array of a time and events")
    return [event for told in batch[1] if (event := _event(told)) is not None]


def _event(told: object) -> Event | None:
    fields: Mapping[Any, Any]
    if isinstance(told, dict):
        kind, fields = told.get("type"), told
    elif isinstance(told, list) and told:
        kind = told[0]
        fields = dict(zip(_FIELDS.get(kind, ()) if isinstance(kind, str) else (), told[1:], strict=False))
    else:
        raise MalformedEventError("an event is neither an array nor a map")
    if kind == "AllBlocksCleared":
        return AllCleared()
    if kind == "BlockStored":
        return _stored(fields)
    return BlocksRemoved(_hashes(fields), _place(fields)) if kind == "BlockRemoved" else None


def _stored(fields: Mapping[Any, Any]) -> BlocksStored:
    parent, block_size = fields.get("parent_block_hash"), fields.get("block_size")
    token_ids = fields.get("token_ids")
    if parent is not None and not _is_hash(parent):
        raise MalformedEventError("parent_block_hash is no block hash")
    if not _is_int(block_size, 1, MAX_BLOCK_SIZE) or not isinstance(token_ids, list):
        raise MalformedEventError("block_size or token_ids is missing or no such thing")
    hashes = _hashes(fields)
    return BlocksStored(
        hashes, parent, token_ids, block_size, _place(fields), _root(fields, len(hashes), parent is None)
    )


def _root(fields: Mapping[Any, Any], num_blocks: int, is_first: bool) -> int | None:
    """Return the key of adapter and salt; None if the blocks depend on more than these."""
    adapter, per_block = fields.get("lora_name"), fields.get("extra_keys")
    if adapter is None and fields.get("lora_id") is not None:
        return None  # an adapter without its name
    if adapter is not None and not _is_name(adapter):
        return None
    salt = ""
    if per_block is not None:
        if not isinstance(per_block, list) or len(per_block) != num_blocks:
            return None
        for index, keys in enumerate(per_block):
            extra = [key for key in keys if key != adapter] if isinstance(keys, list) else keys and [keys]
            if not extra:
                continue
            if index or not is_first or len(extra) != 1 or not isinstance(extra[0], str):
                return None
            salt = extra[0]
    return root_key(adapter or "", salt)


def _hashes(fields: Mapping[Any, Any]) -> list[BlockHash]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or not all(map(_is_hash, hashes)):
        raise MalformedEventError("block_hashes is no array of block hashes")
    return hashes


def _place(fields: Mapping[Any, Any]) -> Place:
    group, medium = fields.get("group_idx"), fields.get("medium")
    return (group if _is_int(group, 0, 1 << 16) else 0), (medium if _is_name(medium) else "")


def _is_hash(value: object) -> TypeGuard[BlockHash]:
    return type(value) is int or (isinstance(value, bytes) and len(value) <= MAX_HASH_BYTES)


def _is_int(value: object, low: int, high: int) -> TypeGuard[int]:
    return type(value) is int and low <= value <= high


def _is_name(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) <= MAX_NAME_CHARS


# -- the wire: ZMTP 3.0 without security -------------------------------------------------------------

_GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4


class _Connection:
    """A connection to a ZeroMQ socket of a node."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, host: str, port: int, kind: bytes) -> _Connection:
        """Connect as a socket of a kind, such as `SUB`.

        Raises:
            OSError, EOFError, TimeoutError: It cannot be reached.
            MalformedEventError: It is no ZeroMQ socket.
        """
        async with asyncio.timeout(CONNECT_S):
            connection = cls(*await asyncio.open_connection(host, port))
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
                connection._writer.write(_GREETING + bytes((_COMMAND, len(ready))) + ready)
                theirs = await connection._reader.readexactly(len(_GREETING))
                if theirs[0] != 0xFF or theirs[10] < 3 or theirs[12:32].rstrip(b"\0") != b"NULL":
                    raise MalformedEventError("the port is no ZeroMQ socket without security")
                flags, _ = await connection._frame(MAX_MESSAGE_BYTES)
                if not flags & _COMMAND:
                    raise MalformedEventError("the ZeroMQ socket does not say what it is")
        except BaseException:
            connection.close()
            raise
        return connection

    async def send(self, *frames: bytes) -> None:
        """Send a message of short frames."""
        for number, frame in enumerate(frames, 1):
            flags = _MORE if number < len(frames) else 0
            self._writer.write(struct.pack(">BQ", flags | _LONG, len(frame)) + frame)
        await self._writer.drain()

    async def receive(self) -> list[bytes]:
        """Return the next message.

        Raises:
            OSError, EOFError: The connection has ended.
            MalformedEventError: The message is too large.
        """
        frames: list[bytes] = []
        left = MAX_MESSAGE_BYTES
        for _ in range(MAX_FRAMES):
            flags, frame = await self._frame(left)
            if flags & _COMMAND:
                continue
            frames.append(frame)
            left -= len(frame)
            if not flags & _MORE:
                return frames
        raise MalformedEventError(f"a message has more than {MAX_FRAMES} frames")

    async def _frame(self, most: int) -> tuple[int, bytes]:
        (flags,) = await self._reader.readexactly(1)
        length = int.from_bytes(await self._reader.readexactly(8 if flags & _LONG else 1), "big")
        if length > most:
            raise MalformedEventError(f"a message is larger than {MAX_MESSAGE_BYTES} bytes")
        return flags, await self._reader.readexactly(length)

    def close(self) -> None:
        self._writer.transport.abort()


# -- following ---------------------------------------------------------------------------------------


class EventFollower:
    """Keeps an index in step with what nodes publish.

    Args:
        follow: Whose events are followed.
    """

    def __init__(self, prefixes: Prefixes, follow: Follow) -> None:
        self._prefixes, self._follow = prefixes, follow
        self._tasks: dict[str, tuple[Publisher, asyncio.Task[None]]] = {}
        self._logged: dict[str, float] = {}

    @property
    def num_followed(self) -> int:
        """Nodes of which events have come."""
        return len(self._prefixes.followed)

    async def run(self, nodes: Callable[[], Iterable[UpstreamNode]]) -> None:
        """Follow the nodes that publish, until this is cancelled."""
        try:
            while True:
                self._look(nodes())
                await asyncio.sleep(LOOK_S)
        finally:
            tasks = [task for _, task in self._tasks.values()]
            for url in list(self._tasks):
                self.restart(url)
            await asyncio.gather(*tasks, return_exceptions=True)

    def restart(self, url: str) -> None:
        """Follow a node anew, if it publishes, because its process has ended."""
        if url in self._tasks:
            self._tasks.pop(url)[1].cancel()

    def _look(self, nodes: Iterable[UpstreamNode]) -> None:
        wanted: dict[str, Publisher] = {}
        for node in nodes:
            if publisher := self._publisher(node.url, node.kv_events):
                wanted[node.url] = publisher
                # A server of vLLM may have further names of its model, which its engine does not know.
                self._prefixes.own_models[node.url] = publisher.models | node.abilities.vllm_models
        for url in [url for url, (publisher, _) in self._tasks.items() if wanted.get(url) != publisher]:
            self.restart(url)
            self._prefixes.forget(url)
        for url in wanted.keys() - self._tasks.keys():
            task = asyncio.create_task(self._keep_following(url, wanted[url]))
            self._tasks[url] = wanted[url], task
        self._logged = {url: at for url, at in self._logged.items() if url in wanted}

    def _publisher(self, url: str, said: object) -> Publisher | None:
        if not said or self._follow == "off":
            return None
        publisher = publisher_of(url, said)
        if publisher is None or (self._follow == "auto" and not is_loopback(publisher.host)):
            return None
        return publisher

    async def _keep_following(self, url: str, publisher: Publisher) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = time.monotonic()
            try:
                await self._follow_once(url, publisher)
            except MalformedEventError as error:
                self._warn(url, f"cannot follow the KV events of {url}: {error}")
            except (OSError, EOFError) as error:
                self._warn(url, f"lost the KV events of {url}: {error!r}")
            except Exception:
                # A bug of ours must not end the router, nor be repeated without an end.
                logger.exception("cannot follow the KV events of %s any more", url)
                return
            finally:
                # What it says from now on is not heard.
                self._prefixes.unfollow(url)
            pause_s = (
                FIRST_PAUSE_S if time.monotonic() - began_s > LOG_S else min(2 * pause_s, LONGEST_PAUSE_S)
            )
            await asyncio.sleep(pause_s)

    async def _follow_once(self, url: str, publisher: Publisher) -> None:
        connection = await _Connection.open(publisher.host, publisher.port, b"SUB")
        try:
            await connection.send(b"\x01" + publisher.topic.encode())
            # A node that has been at work for a while has stored blocks before this.
            expected = replayed = await self._replay(url, publisher, 0)
            is_first = expected == 0
            while True:
                number, payload = _numbered(await connection.receive())
                if number < replayed:
                    await asyncio.sleep(MESSAGE_S / SHARE_OF_TIME)
                    continue
                if number > expected and not is_first:
                    expected = replayed = await self._replay(url, publisher, expected)
                    # A node whose numbers are always wrong must not keep the router busy.
                    await asyncio.sleep(LOOK_S)
                    if number < replayed:
                        continue
                if number != expected and not is_first:
                    self._warn(url, f"lost KV events of {url}: {number} came after {expected - 1}")
                    self._prefixes.clear(url)
                await self._take_in(url, payload)
                expected, is_first = number + 1, False
        finally:
            connection.close()

    async def _replay(self, url: str, publisher: Publisher, first: int) -> int:
        """Take in the batches from a number on that the node still has.

        Returns the number after the last of them.
        """
        expected = first
        if not publisher.replay_port:
            return expected
        with contextlib.suppress(OSError, EOFError, MalformedEventError):
            connection = await _Connection.open(publisher.host, publisher.replay_port, b"DEALER")
            try:
                async with asyncio.timeout(REPLAY_S):
                    await connection.send(b"", first.to_bytes(8, "big"))
                    while True:
                        number, payload = _numbered(await connection.receive())
                        if number == END_OF_REPLAY:
                            break
                        if number != expected and expected:
                            self._prefixes.clear(url)  # the node no longer has some
                        await self._take_in(url, payload)
                        expected = number + 1
            finally:
                connection.close()
        return expected

    async def _take_in(self, url: str, payload: bytes) -> None:
        began_s = time.monotonic()
        self._prefixes.apply(url, decode(payload))
        await asyncio.sleep((MESSAGE_S + time.monotonic() - began_s) * (1 / SHARE_OF_TIME - 1))

    def _warn(self, url: str, what: str) -> None:
        """Log one line per node and minute."""
        now = time.monotonic()
        if now - self._logged.get(url, -LOG_S) >= LOG_S:
            self._logged[url] = now
            logger.warning("%s; the router guesses what this node has cached", what)


def _numbered(frames: Sequence[bytes]) -> tuple[int, bytes]:
    """Return the number and the payload of a message. The frames before them are a topic, or an empty one."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise MalformedEventError("a message has no number of 8 bytes before its events")
    return int.from_bytes(frames[-2], "big"), frames[-1]
