"""`kvferry explain` asks nodes that want keys, and tells no one the keys."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvferry.cli.main import main
from kvferry.transports.testing.certificates import Authority

KEY, ADMIN_KEY = "sk-public", "sk-admin"
SPAN = {
    "request_id": "a",
    "name": "generate",
    "start": 1.0,
    "end": 2.0,
    "attributes": {"prompt_tokens": 3},
    "events": [],
    "error": "",
}


@pytest.fixture
def node() -> Iterator[ThreadingHTTPServer]:
    """A fake node with an admin port. It records which key each path was asked with."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, ThreadingHTTPServer)
        server.asked.append((self.path, self.headers["Authorization"]))  # type: ignore[attr-defined]
        answers = {
            "/health": {"status": "ok", "admin_port": server.server_address[1]},
            "/admin/requests/a": {"process": "decode", "engine_id": "e", "spans": [SPAN]},
        }
        known = self.path in answers
        is_allowed = (
            not self.path.startswith("/admin") or self.headers["Authorization"] == f"Bearer {ADMIN_KEY}"
        )
        self.send_response(200 if known and is_allowed else 401)
        self.end_headers()
        self.wfile.write(json.dumps(answers.get(self.path, {})).encode())

    def log_message(self, *_: object) -> None:
        return


def test_explain_finds_the_admin_port_and_presents_its_key_only_there(
    node: ThreadingHTTPServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "key"
    file.write_text(f"# of the admin endpoints\n{ADMIN_KEY}\n")
    monkeypatch.setenv("KVFERRY_API_KEY", KEY)
    url = f"http://127.0.0.1:{node.server_address[1]}"
    assert main(["explain", "a", url, "--admin-api-key-file", str(file)]) == 0
    assert "3 prompt tokens" in capsys.readouterr().out
    keys = dict(node.asked)  # type: ignore[attr-defined]
    assert keys == {
        "/nodes": f"Bearer {KEY}",
        "/health": f"Bearer {KEY}",
        "/admin/requests/a": f"Bearer {ADMIN_KEY}",
    }


def test_a_wrong_key_is_reported_without_showing_it(
    node: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{node.server_address[1]}"
    for wrong, status, why in (("sk-wrong", 1, "401"), ("sk-wrong\n", 2, "no HTTP header can carry")):
        monkeypatch.setenv("KVFERRY_ADMIN_API_KEY", wrong)
        assert main(["explain", "a", url]) == status
        said = "".join(capsys.readouterr())
        assert why in said
        assert "sk-wrong" not in said


def test_an_https_node_is_verified_by_the_given_cas(
    node: ThreadingHTTPServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    authority = Authority.make(tmp_path)
    files = authority.issue("node")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files["tls_cert"], files["tls_key"])
    node.socket = context.wrap_socket(node.socket, server_side=True)
    monkeypatch.setenv("KVFERRY_ADMIN_API_KEY", ADMIN_KEY)
    url = f"https://127.0.0.1:{node.server_address[1]}"
    assert main(["explain", "a", url, "--ca-certs", str(authority.pem)]) == 0
    assert main(["explain", "a", url]) == 1
    assert "certificate verify failed" in capsys.readouterr().out
