"""A pair of HTTP servers that answer like vLLM with a connector, and have the faults that `kvferry prove`
must find.

The model is a hash of the prompt. What a prefill server has computed is in a dictionary that both servers
see.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

#: `checks` compares the prompt with what was computed; `trusts` does not; the others check, and have the
#: fault that they name.
Behaviour = Literal["checks", "trusts", "leaks", "hangs", "dies"]
#: A lease ends when the metrics of the prefill server have been read so often. So no test depends on time.
LEASE_READS = 2
NUM_BLOCKS = 4


class Store:
    """What prefill servers have computed: name → prompt, and how many reads of metrics its lease
    still lasts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, tuple[list[int], int]] = {}

    def offer(self, prompt: list[int], lease: int) -> str:
        with self._lock:
            name = f"{len(self._held):08d}"
            self._held[name] = prompt, lease
        return name

    def prompt_of(self, name: object) -> list[int] | None:
        """Return the prompt also after its lease, as memory does that nothing has overwritten."""
        return self._held.get(name, (None, 0))[0] if isinstance(name, str) else None

    def end(self, name: str) -> None:
        with self._lock:
            self._held[name] = self._held[name][0], 0

    def is_held(self, name: str) -> bool:
        return self._held[name][1] > 0

    def read(self) -> int:
        """Return the number of leases that have not ended, and shorten all of them."""
        with self._lock:
            held = sum(lease > 0 for _, lease in self._held.values())
            self._held = {name: (prompt, lease - 1) for name, (prompt, lease) in self._held.items()}
            return held


class Server(ThreadingHTTPServer):
    """One server of a pair, or a single one."""

    def __init__(self, store: Store, side: str, behaviour: Behaviour) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store, self.side, self.behaviour = store, side, behaviour
        self.num_loaded = 0
        self.is_dead = False
        self.is_over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, body: Mapping[str, Any]) -> tuple[int, Sequence[int], dict[str, Any] | None]:
        """Return the status, the answer's tokens, and the params for a decode server."""
        prompt, params = body["prompt"], body.get("kv_transfer_params") or {}
        if self.side == "prefill" and params.get("do_remote_decode"):
            lease = 1 << 30 if self.behaviour == "leaks" else LEASE_READS
            offered = {
                "do_remote_prefill": True,
                "name": self.store.offer(prompt, lease),
                "num_tokens": len(prompt),
            }
            return 200, tokens_of(prompt, body["max_tokens"]), offered
        if self.side == "decode" and params.get("do_remote_prefill"):
            name, computed = params.get("name"), self.store.prompt_of(params.get("name"))
            if self.behaviour == "trusts" and computed is not None:
                return 200, tokens_of(computed, body["max_tokens"]), None
            if (
                computed != prompt
                or not self.store.is_held(str(name))
                or params.get("num_tokens") != len(prompt)
            ):
                self.is_dead = self.behaviour == "dies"
                if self.behaviour == "hangs":
                    self.is_over.wait(30.0)
                return 500, (), None
            if self.behaviour != "leaks":
                self.store.end(str(name))
            self.num_loaded += len(prompt)
        return 200, tokens_of(prompt, body["max_tokens"]), None


def tokens_of(prompt: Sequence[int], num: int) -> list[int]:
    """Return the answer of the model."""
    digest = hashlib.sha256(bytes(prompt)).digest()
    return [digest[at % len(digest)] for at in range(num)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _send(self, status: int, raw: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        server = self.server
        if self.path == "/health":
            self._send(503 if server.is_dead else 200, b"")
            return
        used = server.store.read() / 100 if server.side == "prefill" else 0.0
        lines = [
            f'vllm:kv_cache_usage_perc{{engine="0"}} {used}',
            f'vllm:external_prefix_cache_hits_total{{engine="0"}} {server.num_loaded}',
            f'vllm:cache_config_info{{block_size="32",num_gpu_blocks="{NUM_BLOCKS}"}} 1.0',
        ]
        pages = {"/version": '{"version": "0.0-fake"}', "/v1/models": '{"data": [{"id": "model"}]}'}
        self._send(200, pages.get(self.path, "\n".join(lines) + "\n").encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, tokens, params = self.server.answer(body)
        if status != 200:
            self._send(status, b'{"error": {"message": "the load failed"}}')
            return
        choice = {
            "token_ids": tokens,
            "finish_reason": "length",
            "logprobs": {"token_logprobs": [-1.0] * len(tokens)},
        }
        whole = {"choices": [choice], "kv_transfer_params": params}
        if not body["stream"]:
            self._send(200, json.dumps(whole).encode())
            return
        raw = b"data: " + json.dumps(whole).encode() + b"\n\ndata: [DONE]\n\n"
        self._send(200, raw)


@contextmanager
def running_pair(behaviour: Behaviour) -> Iterator[dict[str, str]]:
    """Run a pair and a single server. Yields their URLs by side."""
    store = Store()
    with ExitStack() as stack:
        urls = {}
        for side in ("prefill", "decode", "alone"):
            server = stack.enter_context(Server(store, side, behaviour))
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            stack.callback(server.is_over.set)
            urls[side] = server.url
        yield urls
