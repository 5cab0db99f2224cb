"""A steady stream of requests, and their outcomes."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from kvferry.lab.client import events_of

#: Seconds for one request.
DEADLINE_S = 60.0
#: Seconds between two requests of a client, and between two attempts to connect to a router.
PAUSE_S = 0.05

#: `whole`: answered. `refused`: ended by an error object. `broken`: the connection broke. `hung up`: the
#: client left.
Ending = Literal["whole", "refused", "broken", "hung up"]


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        router: Name of the router that receives it.
        hang_up_s: Seconds after which the client leaves. Infinity: it stays.
    """

    router: str
    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool
    hang_up_s: float

    @property
    def body(self) -> bytes:
        """The body of the POST."""
        fields = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        mine = {"prompt": self.prompt, "max_tokens": self.max_tokens, "stream": self.stream}
        return json.dumps(fields | mine).encode()


@dataclass
class Answer:
    """The part of an answer that has arrived.

    Attributes:
        error: The error object that ended the answer. Empty if there is none.
        transfer: How the cache was transferred to the decode node. Empty if it was not.
    """

    token_ids: list[int] = field(default_factory=list)
    error: Mapping[str, Any] = field(default_factory=dict)
    transfer: Mapping[str, Any] = field(default_factory=dict)

    def add(self, piece: Mapping[str, Any]) -> None:
        """Add an event of a stream, or a whole answer."""
        for choice in piece.get("choices", ()):
            self.token_ids += choice["token_ids"]
        self.error = piece.get("error") or self.error
        self.transfer = (piece.get("metrics") or {}).get("transfer") or self.transfer


@dataclass(frozen=True)
class Outcome:
    """How a request ended.

    Attributes:
        began_s, ended_s: Seconds from the start of the run.
        expected: The token ids of the whole answer.
        why: The error of a broken connection. Empty otherwise.
    """

    ask: Ask
    ending: Ending
    began_s: float
    ended_s: float
    answer: Answer
    expected: Sequence[int]
    why: str = ""


def draw_asks(seed: int, routers: Sequence[str], max_prompt_tokens: int) -> Iterator[Ask]:
    """Draw requests without end: short and long prompts, with shared prefixes, for one token or several."""
    dice = random.Random(seed)
    shared = [_draw_words(random.Random(number), 40 * number) for number in range(1, 5)]
    while True:
        tail = _draw_words(dice, dice.choice((1, 20, 100, max_prompt_tokens)))
        yield Ask(
            router=dice.choice(routers),
            prompt=(*dice.choice((*shared, ())), *tail)[:max_prompt_tokens],
            max_tokens=dice.choice((1, 4, 12, 24)),
            stream=dice.random() < 0.5,
            hang_up_s=dice.expovariate(2.0) if dice.random() < 0.15 else float("inf"),
        )


def _draw_words(dice: random.Random, most: int) -> tuple[int, ...]:
    return tuple(dice.randrange(256) for _ in range(dice.randint(1, most)))


class Traffic:
    """Clients that send requests until `stop`, each in its own thread.

    Args:
        streams: The requests of each client.
        ports: The port of each router.
        expect: Returns the expected answer. Called from several threads.
        now: Returns the seconds since the start of the run.
    """

    def __init__(
        self,
        streams: Sequence[Iterator[Ask]],
        ports: Mapping[str, int],
        expect: Callable[[Ask], Sequence[int]],
        now: Callable[[], float],
    ) -> None:
        self._ports = ports
        self._expect = expect
        self._now = now
        self._is_over = threading.Event()
        self._outcomes: list[Outcome] = []
        self._threads = [threading.Thread(target=self._run, args=(stream,)) for stream in streams]
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Outcome]:
        """Wait for the requests in flight, and return all outcomes.

        Raises:
            TimeoutError: A request has not ended within its deadline.
        """
        self._is_over.set()
        deadline = time.monotonic() + 2 * DEADLINE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                raise TimeoutError(f"a request has not ended within {DEADLINE_S:g} s")
        return self._outcomes

    def _run(self, stream: Iterator[Ask]) -> None:
        while not self._is_over.wait(PAUSE_S):
            self._outcomes.append(self._carry_out(next(stream)))

    def _carry_out(self, ask: Ask) -> Outcome:
        answer, why = Answer(), ""
        with self._connected(self._ports[ask.router]) as connection:
            began_s = self._now()
            try:
                ending = self._converse(connection, ask, answer)
            except (OSError, http.client.HTTPException) as error:
                ending, why = "broken", f"{type(error).__name__}: {error}"
            ended_s = self._now()
        return Outcome(ask, ending, began_s, ended_s, answer, self._expect(ask), why)

    def _converse(self, connection: http.client.HTTPConnection, ask: Ask, answer: Answer) -> Ending:
        """Send a request, and read its answer into `answer`."""
        connection.request("POST", "/v1/completions", ask.body, {"Content-Type": "application/json"})
        if ask.hang_up_s < DEADLINE_S:
            self._is_over.wait(ask.hang_up_s)
            return "hung up"
        with connection.getresponse() as response:
            is_stream = response.headers.get_content_type() == "text/event-stream"
            for piece in events_of(response) if is_stream else [json.loads(response.read())]:
                answer.add(piece)
        return "refused" if answer.error else "whole"

    @contextmanager
    def _connected(self, port: int) -> Iterator[http.client.HTTPConnection]:
        """Connect as soon as the router listens."""
        deadline = time.monotonic() + DEADLINE_S
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        with closing(connection):
            while True:
                try:
                    connection.connect()
                    break
                except ConnectionRefusedError:
                    if time.monotonic() > deadline:
                        raise
                time.sleep(PAUSE_S)
            yield connection
