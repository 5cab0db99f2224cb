"""What a client sees of a server: whole answers, streams, errors, silence, and a client that leaves."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvferry.lab.prove.client import LOADED, USAGE, Client, Form, image_of
from tests.support.patience import DEADLINE_S

METRICS = f"""\
# HELP x a comment
{USAGE}{{engine="0"}} 0.25
{LOADED}{{engine="0",model_name="m"}} 64.0
{LOADED}{{engine="1",model_name="m"}} 6.4e+01
vllm:cache_config_info{{block_size="32",num_gpu_blocks="96"}} 1.0
"""


def _choice(tokens: list[int], reason: str | None) -> dict[str, object]:
    scores = [-0.5 * token for token in tokens]
    tops = [
        {f"token_id:{token}": score, "token_id:99": -9.0} for token, score in zip(tokens, scores, strict=True)
    ]
    return {
        "choices": [
            {
                "token_ids": tokens,
                "finish_reason": reason,
                "logprobs": {"token_logprobs": scores, "top_logprobs": tops},
            }
        ]
    }


def _chat(body: dict[str, Any]) -> dict[str, object]:
    """Answer as vLLM does: an encoder, which is asked for no log probabilities, has no tokens."""
    ((image, text),) = [message["content"] for message in body["messages"]]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert "kv_transfer_params" not in body
    if "logprobs" not in body:
        return {"choices": [{"token_ids": [], "finish_reason": "stop"}]}
    scores = {"content": [{"token": "token_id:7", "logprob": -0.5}]}
    return {"choices": [{"token_ids": [len(text["text"])], "finish_reason": "length", "logprobs": scores}]}


class _Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.has_left, self.may_end = threading.Event(), threading.Event()


class _Handler(BaseHTTPRequestHandler):
    """Answers as the prompt's first token says."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def _send(self, status: int, raw: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        self._send(*((200, METRICS.encode()) if self.path == "/metrics" else (503, b'{"detail": "dead"}')))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/chat/completions":
            return self._send(200, json.dumps({**_chat(body), "ec_transfer_params": {"item": {}}}).encode())
        kind = body["prompt"][0]
        if kind == 1:
            whole = {**_choice([7, 8], "length"), "kv_transfer_params": {"a": body["kv_transfer_params"]}}
            self._send(200, json.dumps(whole).encode())
        elif kind == 2:
            self._send(500, b'{"error": {"message": "cannot load", "code": 500}}')
        elif kind == 3:
            self.server.may_end.wait(DEADLINE_S)
            self.close_connection = True
        else:
            self._stream(kind)

    def _stream(self, kind: int) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True

        def event(value: object) -> None:
            self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")

        event(_choice([7], None))
        if kind == 4:
            event(_choice([8], "length"))
            self.wfile.write(b"data: [DONE]\n\n")
        elif kind == 5:
            event({"error": {"message": "the node is lost"}})
        elif kind == 6:
            self.rfile.read(1)  # returns when the client has closed its side
            self.server.has_left.set()


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.may_end.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def client(server: _Server) -> Client:
    return Client(f"http://127.0.0.1:{server.server_address[1]}/", "model", 5.0)


def test_a_whole_answer_has_tokens_scores_and_params(client: Client) -> None:
    asking = client.start([1], 2, "id", {"x": 1}, top=2)
    reply = asking.reply()
    assert (reply.status, reply.is_whole, reply.error) == (200, True, "")
    assert (reply.token_ids, reply.logprobs) == ([7, 8], [-3.5, -4.0])
    assert reply.params == {"a": {"x": 1}}
    assert asking.likeliest == [(7, -3.5), (99, -9.0)]


def test_a_prompt_can_come_with_an_image(server: _Server) -> None:
    url = f"http://127.0.0.1:{server.server_address[1]}"
    reply = Client(url, "model", 5.0, Form.ILLUSTRATED).ask([1, 2, 3], 1, "id")
    assert (reply.is_whole, reply.token_ids, reply.logprobs) == (True, [3], [-0.5])
    encoded = Client(url, "model", 5.0, Form.ENCODED).ask([1, 2, 3], 1, "id")
    assert (encoded.is_whole, encoded.token_ids, encoded.params) == (True, [], {"item": {}})


def test_each_prompt_has_an_image_of_its_own() -> None:
    one, same, other = (image_of(prompt) for prompt in ([1, 2], [1, 2], [1, 3]))
    assert one == same != other
    assert one.startswith(b"\x89PNG\r\n\x1a\n")


def test_an_error_has_its_message(client: Client) -> None:
    reply = client.ask([2], 2, "id")
    assert (reply.status, reply.is_whole, reply.error) == (500, False, "cannot load")


def test_silence_ends_at_the_deadline(server: _Server) -> None:
    reply = Client(f"http://127.0.0.1:{server.server_address[1]}", "model", 0.2).ask([3], 2, "id")
    assert reply.is_late
    assert not reply.is_whole


@pytest.mark.parametrize(
    ("kind", "is_whole", "tokens", "error"),
    [
        (4, True, [7, 8], ""),
        (5, False, [7], "the node is lost"),
        (7, False, [7], "the stream ended without [DONE]"),
    ],
)
def test_a_stream_is_whole_only_if_it_says_so(
    client: Client, kind: int, is_whole: bool, tokens: list[int], error: str
) -> None:
    reply = client.start([kind], 2, "id", stream=True).reply()
    assert (reply.is_whole, reply.token_ids, reply.error) == (is_whole, tokens, error)


def test_a_client_can_leave_in_the_middle(client: Client, server: _Server) -> None:
    asking = client.start([6], 2, "id", stream=True)
    assert asking.first_token.wait(DEADLINE_S)
    asking.leave()
    assert server.has_left.wait(DEADLINE_S)
    assert not asking.reply().is_whole


def test_metrics_are_summed_over_labels(client: Client) -> None:
    assert client.metrics(LOADED, USAGE, "vllm:no_such_metric") == [128.0, 0.25, 0.0]
    assert client.pool() == (96, 32)


def test_a_page_that_is_not_there_is_an_error(client: Client) -> None:
    with pytest.raises(OSError, match="GET /health answered 503: dead"):
        client.get("/health")
