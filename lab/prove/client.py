"""A client of one vLLM server: answers to token ids or to a text with an image, metrics, and the endpoints
for developers.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import http.client
import json
import random
import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from kvferry.lab.client import (
    Answer,
    BrokenAnswerError,
    call,
    events_of,
    message_of,
    parsed,
    pool_of,
    totals_of,
)

from .outcomes import Reply

USAGE: Final = "vllm:kv_cache_usage_perc"
#: Share of the pool of encoder outputs.
ENCODER_USAGE: Final = "kvferry_encoder_pool_usage"
#: Tokens that a server took from its connector instead of computing them.
LOADED: Final = "vllm:external_prefix_cache_hits_total"
#: Images of which it took what the encoder computed.
LOADED_IMAGES: Final = "kvferry_encoder_loaded_items_total"
PREEMPTIONS: Final = "vllm:num_preemptions_total"
#: Seconds for an answer that no fault disturbs, such as a page of metrics.
PATIENCE_S: Final = 30.0


class Form(enum.Enum):
    """How a server is asked."""

    #: With token ids.
    TEXT = enum.auto()
    #: With a text and an image.
    ILLUSTRATED = enum.auto()
    #: The same for an encoder, which computes the image and no answer.
    ENCODED = enum.auto()

    @property
    def path(self) -> str:
        """Of the endpoint."""
        return "/v1/completions" if self is Form.TEXT else "/v1/chat/completions"

    @property
    def params(self) -> str:
        """The field of the transfer's params, in requests and answers."""
        return "kv_transfer_params" if self is Form.TEXT else "ec_transfer_params"

    @property
    def reason(self) -> str:
        """Why a whole answer ends."""
        return "stop" if self is Form.ENCODED else "length"

    def fields(self, prompt: Sequence[int], top: int) -> dict[str, Any]:
        """Return the fields of a body that are not the same in each form."""
        if self is Form.TEXT:
            return {"prompt": list(prompt), "logprobs": top}
        # A letter per token of the prompt, and an image that no other prompt has.
        text = "".join(chr(ord("a") + token % 26) for token in prompt)
        url = "data:image/png;base64," + base64.b64encode(image_of(prompt)).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
        told = {"logprobs": True, "top_logprobs": top} if self is Form.ILLUSTRATED else {}
        return {"messages": [{"role": "user", "content": content}], **told}


_IMAGE_SIDE: Final = 32


def image_of(prompt: Sequence[int]) -> bytes:
    """Return an image as PNG that only this prompt has: random pixels."""
    pixels = random.Random(bytes(prompt)).randbytes(3 * _IMAGE_SIDE * _IMAGE_SIDE)
    row = 3 * _IMAGE_SIDE
    rows = b"".join(b"\0" + pixels[at : at + row] for at in range(0, len(pixels), row))
    size = struct.pack(">IIBBBBB", _IMAGE_SIDE, _IMAGE_SIDE, 8, 2, 0, 0, 0)
    parts = (b"IHDR", size), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


class Asking:
    """A request in flight, in a thread of its own."""

    def __init__(
        self, url: str, form: Form, body: Mapping[str, Any], request_id: str, deadline_s: float
    ) -> None:
        self._form = form
        self._parts = urlsplit(url)
        self._body, self._request_id, self._deadline_s = body, request_id, deadline_s
        self._connection = http.client.HTTPConnection(
            self._parts.hostname or "", self._parts.port, timeout=deadline_s
        )
        self._sock: socket.socket | None = None
        self.sent = threading.Event()
        self.first_token = threading.Event()
        self._reply = Reply()
        self._answer = Answer()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """Close the connection, as a client does that does not wait any longer."""
        if self._sock is not None:
            with contextlib.suppress(OSError):  # the server was faster
                self._sock.shutdown(socket.SHUT_RDWR)

    @property
    def likeliest(self) -> list[tuple[int, float]]:
        """The two likeliest tokens at the answer's first place with their log probabilities, the likeliest
        first.
        """
        return self._answer.likeliest

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def reply(self) -> Reply:
        """Wait for the end, and return how it ended. The wait is bounded by the deadline."""
        self._thread.join()
        return self._reply

    def _run(self) -> None:
        started = time.monotonic()
        until = started + self._deadline_s
        status, is_late, answer = 0, False, self._answer
        try:
            self._connection.connect()
            self._sock = sock = self._connection.sock
            self._connection.request(
                "POST",
                self._parts.path + self._form.path,
                json.dumps(self._body),
                {"Content-Type": "application/json", "X-Request-Id": self._request_id},
            )
            self.sent.set()
            response = self._connection.getresponse()
            status = response.status

            def lines() -> Iterator[bytes]:
                while line := response.readline():
                    sock.settimeout(max(0.01, until - time.monotonic()))
                    yield line

            if status != 200:
                answer.error = message_of(response.read())
            elif not self._body.get("stream"):
                answer.add(parsed(response.read()))
            else:
                for event in events_of(lines()):
                    answer.add(event)
                    if answer.token_ids:
                        self.first_token.set()
        except TimeoutError:
            is_late = True
        except BrokenAnswerError as broken:
            answer.error = answer.error or str(broken)
        except (OSError, http.client.HTTPException, ValueError) as broken:
            answer.error = f"{type(broken).__name__}: {broken}"
        finally:
            self.sent.set()
            self.first_token.set()
            self._connection.close()
        is_whole = status == 200 and not answer.error and not is_late and answer.reason == self._form.reason
        if status == 200 and not answer.error and not is_late and not is_whole:
            answer.error = f"the answer ended for the reason {answer.reason!r}"
        seconds = time.monotonic() - started
        self._reply = Reply(
            *(status, answer.token_ids, answer.logprobs, is_whole, answer.error, is_late, seconds),
            answer.params,
        )


class Client:
    """A client of one server.

    Args:
        model: The name by which the server knows its model.
        deadline_s: An answer that takes longer is a hang.
        form: How it is asked.
    """

    def __init__(self, url: str, model: str, deadline_s: float, form: Form = Form.TEXT) -> None:
        self.url, self._model, self._deadline_s, self._form = url.rstrip("/"), model, deadline_s, form

    def start(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        request_id: str,
        params: object = None,
        *,
        stream: bool = False,
        salt: str = "",
        top: int = 0,
    ) -> Asking:
        """Ask for a greedy answer, and return at once.

        Args:
            params: The request's transfer params; None: it has none.
            top: How many of the likeliest tokens to tell at each place.
        """
        body: dict[str, Any] = {
            "model": self._model,
            **self._form.fields(prompt, top),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "stream": stream,
        }
        if params is not None:
            body[self._form.params] = params
        if salt:
            body["cache_salt"] = salt
        return Asking(self.url, self._form, body, request_id, self._deadline_s)

    def without_image(self) -> Client:
        """Return a client of the same server that sends token ids alone."""
        return Client(self.url, self._model, self._deadline_s)

    def ask(self, prompt: Sequence[int], max_tokens: int, request_id: str, params: object = None) -> Reply:
        """Ask for a greedy answer and wait for it."""
        return self.start(prompt, max_tokens, request_id, params).reply()

    def metrics(self, *names: str) -> list[float]:
        """Return the sums of metrics over their labels. Raises OSError: the server does not answer."""
        found = totals_of(self.get("/metrics"))
        return [found.get(name, 0.0) for name in names]

    def pool(self) -> tuple[int, int]:
        """Return the number of blocks of the pool, and the tokens per block; 0 where the server does not
        tell.
        """
        return pool_of(self.get("/metrics"))

    def get(self, path: str) -> str:
        """Return a page. Raises OSError: the server does not answer it with 200."""
        return call("GET", self.url, path, timeout_s=PATIENCE_S).decode()

    def post(self, path: str, body: object = None) -> str:
        """Post JSON, and return the answer. Raises OSError: the server does not answer with 200."""
        return call("POST", self.url, path, {} if body is None else body, PATIENCE_S).decode()
