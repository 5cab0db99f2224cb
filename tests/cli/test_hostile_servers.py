"""The commands that ask servers survive what a hostile one says, and obey none of it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from kvferry.cli.access import fetch
from kvferry.cli.errors import CommandError
from kvferry.cli.explain import ask
from kvferry.cli.main import main
from kvferry.lab.moving.remote import NoDoctorError, RemoteDoctor

#: Clears the screen, is another way to say CSI, turns the order of letters round, and forges a line.
ESCAPES = "\x1b[2J\x9b2J\u202e\nforged"
SPAN: dict[str, Any] = {
    "request_id": "cmpl-a-12345678",
    "name": "load",
    "start": 1.0,
    "end": 2.0,
    "attributes": {"transport": "tcp", "mechanism": "tcp", "reason": "x", "bytes": 5, "seconds": 0.1},
    "events": [{"at": 1.0, "name": "progress", "reason": "x"}],
    "error": "",
}
ANSWER: dict[str, Any] = {
    "process": "decode",
    "engine_id": "e",
    "spans": [SPAN, SPAN, SPAN | {"error": "x"}],
}

Serve = Callable[[Callable[[socket.socket, str], None]], int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server that treats each connection as a function says, which gets the path; return the port."""
    with ExitStack() as stack:

        def start(answer: Callable[[socket.socket, str], None]) -> int:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

            def run() -> None:
                with suppress(OSError):
                    while True:
                        sock, _ = listener.accept()
                        with sock, suppress(OSError):
                            sock.settimeout(10)
                            asked = sock.recv(65536).decode()
                            answer(sock, asked)

            thread = threading.Thread(target=run)
            thread.start()
            stack.callback(thread.join)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
            return int(listener.getsockname()[1])

        yield start


def said(sock: socket.socket, body: str, status: str = "200 OK") -> None:
    data = body.encode()
    sock.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


def in_every_string(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: in_every_string(part) for key, part in value.items()}
    if isinstance(value, list):
        return [in_every_string(part) for part in value]
    return value + ESCAPES if isinstance(value, str) else value


def assert_obeys_nothing(text: str) -> None:
    assert all(char.isprintable() or char == "\n" for char in text), repr(text)
    assert not [line for line in text.splitlines() if line.lstrip().startswith("forged")]


@pytest.mark.parametrize("way", [[], ["--json"]], ids=["text", "json"])
@pytest.mark.parametrize("status", ["200 OK", "500 no"])
def test_explain_escapes_what_nodes_say(
    serve: Serve, capsys: pytest.CaptureFixture[str], way: list[str], status: str
) -> None:
    answer = in_every_string(ANSWER) | {"error": {"message": ESCAPES}}
    for name, span in zip(("other" + ESCAPES, "load", "generate"), answer["spans"], strict=True):
        span["name"] = name
    port = serve(
        lambda sock, asked: said(sock, json.dumps(answer), status if "/admin" in asked else "200 OK")
    )
    main(["explain", "a", f"http://127.0.0.1:{port}", *way])
    printed = capsys.readouterr()
    assert printed.out
    assert_obeys_nothing(printed.out + printed.err)


def test_explain_escapes_what_routers_say(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    page = json.dumps({"nodes": [{"url": "http://127.0.0.1:1/" + ESCAPES}]})
    port = serve(lambda sock, _: said(sock, page))
    main(["explain", "a", f"http://127.0.0.1:{port}"])
    printed = capsys.readouterr().out
    assert "127.0.0.1:1" in printed
    assert_obeys_nothing(printed)


def test_a_redirect_is_not_followed(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[str] = []

    def redirect(sock: socket.socket, request: str) -> None:
        asked.append(request)
        sock.sendall(b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n")

    assert main(["explain", "a", f"http://127.0.0.1:{serve(redirect)}", "--json"]) == 1
    assert "/elsewhere" not in "".join(asked)
    assert "HTTP status 302" in json.loads(capsys.readouterr().out)["servers"][0]["error"]


@pytest.mark.parametrize("nodes", [[], 5, {"nodes": 5}, {"nodes": [5]}, {"nodes": [{}]}, {"nodes": None}])
def test_a_server_whose_nodes_are_no_list_of_urls_is_asked_itself(serve: Serve, nodes: Any) -> None:
    port = serve(lambda sock, _: said(sock, json.dumps(nodes)))
    url = f"http://127.0.0.1:{port}"
    assert [server.url for server in ask("a", [url])] == [url]


def test_doctor_escapes_what_the_other_side_says(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(sock: socket.socket, _: str) -> None:
        sock.sendall(json.dumps({"doctor": 1, "kvferry": ESCAPES, "paths": ["tcp"]}).encode() + b"\n")
        with suppress(OSError):
            sock.recv(4096)
            sock.sendall(json.dumps({"status": "failed", "reason": ESCAPES}).encode() + b"\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            for _ in range(2):
                sock, _address = listener.accept()
                with sock:
                    answer(sock, "")

        thread = threading.Thread(target=run)
        thread.start()
        port = listener.getsockname()[1]
        assert main(["doctor", "--peer", f"127.0.0.1:{port}", "--path", "tcp"]) == 1
        thread.join()
    printed = capsys.readouterr().out
    assert "forged" in printed
    assert_obeys_nothing(printed)


def with_span(**changed: Any) -> dict[str, Any]:
    return ANSWER | {"spans": [SPAN | changed]}


WRONG: dict[str, Any] = {
    "no span": ANSWER | {"spans": [5]},
    "no list": ANSWER | {"spans": 5},
    "a list": [],
    "no number": with_span(start="x"),
    "no time": with_span(end=1e300),
    "no events": with_span(events={"a": 1}),
    "an event without a name": with_span(events=[{"at": 1.0}]),
    "attributes of attributes": with_span(attributes={"bytes": {"a": 1}}),
    "a number that no float holds": with_span(attributes={"bytes": 10**400}),
}


@pytest.mark.parametrize("wrong", [*WRONG.values(), None], ids=[*WRONG, "100,000 levels"])
@pytest.mark.parametrize("where", ["/admin", "/health"])
def test_explain_says_what_is_wrong_with_an_answer(
    serve: Serve, capsys: pytest.CaptureFixture[str], wrong: Any, where: str
) -> None:
    text = json.dumps(wrong) if wrong is not None else "[" * 100_000 + "]" * 100_000
    port = serve(lambda sock, asked: said(sock, text if where in asked else "{}"))
    assert main(["explain", "a", f"http://127.0.0.1:{port}"]) == 1
    assert (
        "what no server of kvferry answers" if wrong is not None else "no JSON"
    ) in capsys.readouterr().out or (where == "/health")


@pytest.mark.parametrize("head", ["HTTP/1.1 200 OK\r\nX: ", "HTTP/1.1 200 OK\r\n\r\n"], ids=["head", "body"])
def test_a_page_that_drips_is_waited_for_until_the_deadline(serve: Serve, head: str) -> None:
    is_over = threading.Event()

    def drip(sock: socket.socket, _: str) -> None:
        sock.sendall(head.encode())
        while not is_over.wait(0.02):
            sock.sendall(b"a")

    port = serve(drip)
    began = time.monotonic()
    with pytest.raises(CommandError, match="timed out after 0.3 s"):
        fetch(f"http://127.0.0.1:{port}/", 0.3)
    assert time.monotonic() - began < 5.0
    is_over.set()


def test_a_doctor_whose_line_drips_is_waited_for_until_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_over = threading.Event()

    def drip() -> None:
        sock, _ = listener.accept()
        with sock, suppress(OSError):
            while not is_over.wait(0.02):
                sock.sendall(b" ")

    monkeypatch.setattr("kvferry.lab.moving.remote._Lines.receive.__defaults__", (0.3,))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(NoDoctorError, match="timed out"):
            RemoteDoctor.find("127.0.0.1", listener.getsockname()[1])
        is_over.set()
        thread.join()


@pytest.mark.parametrize("greeting", ["[" * 30_000, '{"doctor": 1, "paths": 5}', '{"doctor": 1}', "[]"])
def test_a_malformed_greeting_of_a_doctor_is_an_error(greeting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(greeting.encode() + b"\n")

        thread = threading.Thread(target=run)
        thread.start()
        with pytest.raises(NoDoctorError, match="cannot talk to a doctor"):
            RemoteDoctor.find("127.0.0.1", listener.getsockname()[1])
        thread.join()


@pytest.mark.parametrize(("named", "is_sent"), [("127.0.0.2", False), ("127.0.0.1", True)])
def test_a_key_goes_to_no_host_that_only_a_router_names(
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    named: str,
    is_sent: bool,
) -> None:
    """Without TLS. The name that the user wrote counts, whatever the port: the admin port is another one."""
    monkeypatch.setenv("KVFERRY_ADMIN_API_KEY", "sk-admin")
    monkeypatch.setenv("KVFERRY_API_KEY", "sk-public")
    asked: list[str] = []
    with socket.create_server((named, 0)) as listener:

        def run() -> None:
            with suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    with sock:
                        asked.append(sock.recv(65536).decode())
                        said(sock, "{}", "401 no")

        thread = threading.Thread(target=run)
        thread.start()
        url = f"http://{named}:{listener.getsockname()[1]}"
        page = json.dumps({"nodes": [{"url": url}]})
        router = serve(lambda sock, _: said(sock, page))
        assert main(["explain", "a", f"http://127.0.0.1:{router}"]) == 1
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert asked
    assert ("sk-admin" in "".join(asked)) == is_sent
    assert ("sk-public" in "".join(asked)) == is_sent
    assert ("without the key" in capsys.readouterr().out) != is_sent


def test_only_http_is_fetched(tmp_path: Any) -> None:
    """A router's page may name any URL."""
    file = tmp_path / "secret"
    file.write_text("kvferry_load_failures_total 1\n")
    with pytest.raises(CommandError, match="not an http"):
        fetch(file.as_uri(), 1.0)
