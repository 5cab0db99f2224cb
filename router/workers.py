"""A worker's end of the link to the other processes of its router: it tells, asks and answers.

What it has to tell is collected and sent every `TELL_S` in one frame, so its cost per request is small. What
a worker that has just started has to know of this one is sent to it once, before what is told from then on.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, cast

import orjson

from .answer.sessions import Sessions
from .choice.fleet import Fleet
from .choice.replay import Mirrors, Teller
from .nodes.admin import name_node
from .nodes.membership import ADMIN, Role
from .nodes.pool import NodePool
from .processes import Frame, Frames, Kind, Seat

#: Seconds for which what is to be told is collected.
TELL_S: Final = 0.005
#: Seconds that a question waits for answers: less than a scrape of Prometheus, because counts that lack a
#: worker look like a restart.
ANSWER_S: Final = 5.0
#: Bytes that wait for the parent. It forwards at once, so with more it is stuck.
MAX_UNSENT: Final = 64 << 20

logger = logging.getLogger(__name__)


class Siblings(asyncio.Protocol):
    """The other workers of this router. It is a `launcher_link.Link` as well, to the parent.

    Attributes:
        seat: As the parent gave it.
        ended_metrics: Of workers that have ended.
        on_drain: Called when the router drains.
    """

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.ended_metrics = seat.ended_metrics
        self.on_drain: Callable[[], None] = lambda: None
        self._on_gone: Callable[[], None] = lambda: None
        self._transport: asyncio.WriteTransport | None = None
        self._frames = Frames()
        self._others: set[int] = set()
        self._pending: list[Any] = []
        self._flush_is_due = False
        self._hears: dict[str, Callable[..., None]] = {}
        self._answers: dict[str, Callable[[Any], Any]] = {}
        self._states: dict[str, tuple[Callable[[], Any], Callable[[int, Any], None]]] = {}
        self._ends: list[Callable[[int], None]] = []
        self._questions: dict[int, tuple[set[int], list[bytes], asyncio.Future[None]]] = {}
        self._numbers = itertools.count(1)

    async def connect(self) -> None:
        """Use the running loop from now on."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self.seat.socket)

    # -- as a link to the parent ---------------------------------------------------------------------

    def report(self, **facts: Any) -> None:
        """Send facts to the parent."""
        self._send(Frame(Kind.REPORT, orjson.dumps(facts)))

    def watch(self, on_gone: Callable[[], None]) -> None:
        """Call `on_gone` when the parent has ended, or ends this worker.

        A drain would keep the port for as long, and the parent's successor needs it.
        """
        self._on_gone = on_gone

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self.seat.socket.fileno()

    def close(self) -> None:
        """Close the link."""
        if self._transport is not None:
            self._transport.close()
        self.seat.socket.close()

    def begin_drain(self) -> None:
        """Let all processes of the router drain."""
        self._send(Frame(Kind.DRAIN))

    def keep_metrics(self, text: bytes) -> None:
        """Let the parent keep counts for when this worker has ended."""
        self._send(Frame(Kind.METRICS, text))

    # -- what others may hear and ask ----------------------------------------------------------------

    def hear(self, topic: str, take: Callable[..., None]) -> None:
        """Call `take` with the worker and what it has told about a topic."""
        self._hears[topic] = take

    def share_state(self, topic: str, tell: Callable[[], Any], take: Callable[[int, Any], None]) -> None:
        """Let each two workers exchange a state as soon as both are there.

        What one tells before is not heard.
        """
        self._states[topic] = tell, take

    def answer(self, topic: str, answer: Callable[[Any], Any]) -> None:
        """Answer questions about a topic with what this returns."""
        self._answers[topic] = answer

    def on_end(self, take: Callable[[int], None]) -> None:
        """Call `take` with each worker that has ended."""
        self._ends.append(take)

    def tell(self, topic: str, *content: Any) -> None:
        """Tell all others, soon."""
        self._pending.append((topic, *content))
        self._flush_soon()

    def _flush(self, is_timer: bool = False) -> None:
        if is_timer:
            self._flush_is_due = False
        pending, self._pending = self._pending, []
        if pending and self._others:
            self._tell_all(pending)

    def _flush_soon(self) -> None:
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_later(TELL_S, self._flush, True)

    def _tell_all(self, told: list[Any]) -> None:
        try:
            self._send(Frame(Kind.TELL, orjson.dumps(told)))
        except ValueError:
            if len(told) == 1:
                logger.warning("not told to the other worker processes: %s is too long", told[0][0])
                return
            half = len(told) // 2
            self._tell_all(told[:half])
            self._tell_all(told[half:])

    async def ask(self, topic: str, content: Any) -> list[bytes]:
        """Return what the others answer within `ANSWER_S`; without those that do not."""
        if not self._others:
            return []
        number = next(self._numbers)
        done = asyncio.get_running_loop().create_future()
        answers: list[bytes] = []
        self._questions[number] = set(self._others), answers, done
        try:
            self._send(Frame(Kind.ASK, orjson.dumps((topic, content)), question=number))
            async with asyncio.timeout(ANSWER_S):
                await done
        except TimeoutError:
            late = ", ".join(map(str, sorted(self._questions[number][0])))
            logger.warning("worker process %s did not answer in %g s: %s", late, ANSWER_S, topic)
        finally:
            del self._questions[number]
        return answers

    # -- frames --------------------------------------------------------------------------------------

    def _send(self, frame: Frame) -> None:
        if self._transport is None:
            self.seat.socket.sendall(frame.encoded())  # before there is a loop
            return
        self._transport.write(frame.encoded())
        if self._transport.get_write_buffer_size() > MAX_UNSENT:
            logger.error("the router's parent process does not read; this worker ends")
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._on_gone()

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            try:
                self._take(frame)
            except Exception:
                # A mistake here would end each worker again and again.
                logger.exception("a frame of kind %s from worker %d", frame.kind.name, frame.worker)

    def _take(self, frame: Frame) -> None:
        worker = frame.worker
        match frame.kind:
            case Kind.TELL:
                if worker in self._others:  # otherwise it is part of the state that is about to come
                    for topic, *content in orjson.loads(frame.payload):
                        self._hears[topic](worker, *content)
            case Kind.ASK:
                topic, content = orjson.loads(frame.payload)
                answer = self._answers[topic](content)
                encoded = answer if isinstance(answer, bytes) else orjson.dumps(answer)
                self._send(Frame(Kind.ANSWER, encoded, worker, frame.question))
            case Kind.ANSWER:
                self._answered(worker, frame)
            case Kind.STARTED:
                self._flush()
                states = {topic: tell() for topic, (tell, _) in self._states.items()}
                self._send(Frame(Kind.STATE, orjson.dumps(states), worker))
            case Kind.STATE:
                # The sender flushed before it wrote this, and its news was not heard until now. So no step is
                # replayed twice.
                self._others.add(worker)
                for topic, state in orjson.loads(frame.payload).items():
                    self._states[topic][1](worker, state)
            case Kind.ENDED:
                self.ended_metrics = frame.payload
                self._others.discard(worker)
                for number in list(self._questions):
                    self._left(number, worker)
                for take in self._ends:
                    take(worker)
            case Kind.DRAIN:
                self.on_drain()
            case Kind.STOP:
                self._on_gone()
            case _:
                raise ValueError(f"a frame of kind {frame.kind.name} from the parent")

    def _answered(self, worker: int, frame: Frame) -> None:
        if frame.question in self._questions:
            self._questions[frame.question][1].append(frame.payload)
            self._left(frame.question, worker)

    def _left(self, number: int, worker: int) -> None:
        waited_for, _, done = self._questions[number]
        waited_for.discard(worker)
        if not waited_for and not done.done():
            done.set_result(None)


def share_knowledge(
    siblings: Siblings, fleet: Fleet, sessions: Sessions, pools: Mapping[Role, NodePool]
) -> None:
    """Let the workers choose nodes by the requests of all, and know the same conversations and nodes.

    Each goes on to check nodes, and to follow sources and KV events, itself.
    """
    mirrors = Mirrors(fleet)
    teller = Teller(fleet, partial(siblings.tell, "step"))
    siblings.hear("step", mirrors.take)
    siblings.share_state("steps", teller.state, mirrors.begin)
    siblings.on_end(mirrors.end)

    sessions.on_remembered = lambda key, url: siblings.tell("session", key.hex(), url)
    siblings.hear("session", lambda worker, key, url: sessions.note(bytes.fromhex(key), url))

    siblings.hear("node", lambda worker, role, url, is_named: name_node(pools[role], url, is_named))
    siblings.share_state(
        "nodes",
        lambda: {role: sorted(pool.named_by(ADMIN)) for role, pool in pools.items()},
        lambda worker, state: _name_all(pools, state),
    )


def _name_all(pools: Mapping[Role, NodePool], urls: Mapping[Role, list[str]]) -> None:
    for role, pool in pools.items():
        for url in urls[role]:
            name_node(pool, url, True)
