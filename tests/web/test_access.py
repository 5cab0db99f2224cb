"""Only clients with a key get in, connections are encrypted, and no key appears where it could be read."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvferry.lab.engine.engine import Engine
from kvferry.lab.engine.settings import EngineSettings
from kvferry.lab.node.app import NodeServer
from kvferry.lab.node.cli import parse_arguments
from kvferry.router.app import Router
from kvferry.router.http.access import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLE,
    Access,
    ApiKeys,
    ClientTls,
    NodeAccess,
    OwnKey,
    ServerTls,
    access_of,
    has_key,
)
from kvferry.router.http.admin import Admin, add_admin_arguments, admin_of, serving_admin
from kvferry.router.http.connections import ConnectionLimits, is_overloaded, slot_of
from kvferry.router.http.errors import error_middleware
from kvferry.router.http.json_body import read_json
from kvferry.router.http.serving import StartupError, add_serving_arguments, bind, serving
from kvferry.router.main import main as router_main
from kvferry.router.nodes.pool import NodePool
from kvferry.transports.errors import ConfigurationError
from kvferry.transports.testing.certificates import Authority
from tests.support.patience import DEADLINE_S

JSON = {"Content-Type": "application/json"}
KEY, OTHER = "sk-the-right-key", "sk-another-key"


@pytest.fixture(autouse=True)
def _no_keys_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVFERRY_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def certificate(authority: Authority) -> dict[str, str]:
    return authority.issue("server")


@pytest.fixture(scope="module")
def expired(authority: Authority) -> dict[str, str]:
    return authority.issue("expired", days=-1)


def tls_of(files: dict[str, str], client_ca: str = "") -> ServerTls:
    return ServerTls(files["tls_cert"], files["tls_key"], client_ca)


async def answer(request: web.Request) -> web.Response:
    return web.json_response({"path": request.path})


async def say_whether_overloaded(request: web.Request) -> web.Response:
    return web.Response(status=503 if is_overloaded(request) else 200)


async def take_a_turn(request: web.Request) -> web.Response:
    async with slot_of(request):
        return web.json_response(await read_json(request))


@asynccontextmanager
async def served(access: Access, **limits: Any) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """Serve a few routes. Yields the URL, and a session that trusts no certificate."""
    app = web.Application(middlewares=[error_middleware])
    app.router.add_get("/health", answer)
    app.router.add_get("/ready", say_whether_overloaded)
    app.router.add_get("/v1/models", answer)
    app.router.add_post("/v1/completions", take_a_turn)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(bind("127.0.0.1", 0))
        await stack.enter_async_context(serving(app, listener, ConnectionLimits(**limits), access))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield f"{access.scheme}://127.0.0.1:{listener.getsockname()[1]}", session


async def status_of(session: aiohttp.ClientSession, url: str, key: str | None = None, **options: Any) -> int:
    headers = {} if key is None else {"Authorization": key}
    async with session.get(url, headers=headers, **options) as response:
        return response.status


# -- keys ----------------------------------------------------------------------------------------------


async def test_only_requests_with_one_of_the_keys_are_answered() -> None:
    access = Access(ApiKeys([("--api-key", KEY), ("--api-key", OTHER)]))
    async with served(access) as (url, session):
        models = f"{url}/v1/models"
        for right in (f"Bearer {KEY}", f"bearer {OTHER}", f"Bearer  {KEY} "):
            assert await status_of(session, models, right) == 200
        for wrong in (
            None,
            "",
            "Bearer",
            "Bearer ",
            KEY,
            f"Basic {KEY}",
            f"Bearer {KEY}x",
            f"Bearer {KEY[:-1]}",
        ):
            assert await status_of(session, models, wrong) == 401
        async with session.post(f"{url}/v1/completions", json={}) as response:
            assert response.status == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert (await response.json())["error"]["code"] == "invalid_api_key"


async def test_probes_need_no_key_and_no_way_to_write_a_path_makes_it_an_open_one() -> None:
    async with served(Access(ApiKeys([("--api-key", KEY)]))) as (url, session):
        assert await status_of(session, f"{url}/health") == 200
        for path in (
            "/health/",
            "//health",
            "/v1/models?/health",
            "/v1/models#/health",
            "/%76%31/models",
            "/no",
        ):
            assert await status_of(session, f"{url}{path}") == 401


async def test_keys_of_a_file_that_changes_are_used_at_once_and_a_broken_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# the first\n\n{KEY}\n")
    file.chmod(0o600)
    async with served(Access(ApiKeys([], "--api-key-file", str(file)))) as (url, session):
        models = f"{url}/v1/models"
        assert await status_of(session, models, f"Bearer {KEY}") == 200
        file.write_text(f"{OTHER}\n{KEY}-2\n")
        assert await status_of(session, models, f"Bearer {KEY}") == 401
        assert await status_of(session, models, f"Bearer {OTHER}") == 200
        file.write_text("# none\n")
        for _ in range(2):
            assert await status_of(session, models, f"Bearer {OTHER}") == 200
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "--api-key-file" in warnings[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda folder: ApiKeys([("--api-key", f"{KEY} x")]),
            "--api-key has a key that no HTTP header can carry",
        ),
        (lambda folder: ApiKeys([], "--api-key-file", f"{folder}/none"), "cannot read --api-key-file="),
        (lambda folder: ApiKeys([], "--api-key-file", _written(folder, "\n# no key\n")), "has no key"),
        (
            lambda folder: OwnKey("v", "", "--node-api-key-file", _written(folder, f"{KEY} x")),
            "--node-api-key-file=",
        ),
    ],
    ids=["a space", "no file", "an empty file", "a space in a file"],
)
def test_keys_that_cannot_work_are_refused_without_showing_them(
    make: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make(tmp_path)
    assert message in str(caught.value)
    assert KEY not in f"{caught.value!r} {vars(caught.value)}"


def _written(folder: Path, text: str) -> str:
    (folder / "keys").write_text(text)
    return str(folder / "keys")


async def test_no_key_appears_in_logs_errors_or_representations(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    access = Access(ApiKeys([("--api-key", KEY)]))
    said = [repr(access), repr(access.keys), repr(OwnKey("v", KEY)), repr(NodeAccess(OwnKey("v", KEY)))]
    async with served(access) as (url, session):
        for key in (KEY, OTHER):
            headers = {"Authorization": f"Bearer {key}"}
            for path, body in (("/v1/completions", b"{"), ("/none", b"{}")):
                async with session.post(url + path, data=body, headers=headers) as response:
                    said.append(await response.text())
    with pytest.raises(StartupError) as caught:
        parse_arguments(["--host", "0.0.0.0", "--api-key", KEY])
    status = router_main(
        [
            "--port",
            "0",
            "--prefill",
            "http://10.0.0.1:1",
            "--decode",
            "http://127.0.0.1:1",
            "--api-key",
            f"{KEY} {OTHER}",
        ]
    )
    assert status == 2
    said += [str(caught.value), *capfd.readouterr(), caplog.text]
    assert not [text for text in said if KEY in text or OTHER in text]


# -- where keys and TLS are required -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ([], ["TLS (--ssl-certfile", "a key (--api-key-file"]),
        (["--api-key", KEY], ["TLS (--ssl-certfile"]),
        (["tls"], ["a key (--api-key-file"]),
        (["tls", "--api-key", KEY], []),
        (["--insecure-http"], []),
    ],
    ids=["neither", "a key", "TLS", "both", "insecure"],
)
def test_beyond_loopback_a_server_starts_only_with_tls_and_a_key_or_if_told_otherwise(
    words: list[str], missing: list[str], certificate: dict[str, str]
) -> None:
    files = ["--ssl-certfile", certificate["tls_cert"], "--ssl-keyfile", certificate["tls_key"]]
    arguments = [word for given in words for word in (files if given == "tls" else [given])]
    parse_arguments(arguments)  # on loopback everything is allowed
    try:
        parse_arguments(["--host", "0.0.0.0", *arguments])
        message = ""
    except StartupError as error:
        message = str(error)
    assert all(part in message for part in missing)
    assert bool(message) == bool(missing)


def test_keys_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, KEY)
    keys = parse_arguments([]).access.keys
    assert (keys.admits(f"Bearer {KEY}"), keys.admits(f"Bearer {OTHER}")) == (True, False)


# -- TLS -----------------------------------------------------------------------------------------------


async def test_a_client_that_trusts_the_ca_is_served_over_https(
    authority: Authority, certificate: dict[str, str]
) -> None:
    async with served(Access(tls=tls_of(certificate))) as (url, session):
        trusting = ssl.create_default_context(cafile=str(authority.pem))
        assert await status_of(session, f"{url}/health", ssl=trusting) == 200
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await status_of(session, f"{url}/health")
        with pytest.raises(aiohttp.ClientError):
            await status_of(session, url.replace("https", "http") + "/health")


async def test_a_certificate_that_is_replaced_is_shown_to_later_clients_and_a_broken_one_is_not(
    authority: Authority, certificate: dict[str, str], expired: dict[str, str], tmp_path: Path
) -> None:
    newer = authority.issue("newer")
    files = {name: str(tmp_path / name) for name in ("tls_cert", "tls_key")}

    def put(source: dict[str, str], *names: str) -> None:
        for name in names or files:
            Path(files[name]).write_bytes(Path(source[name]).read_bytes())

    async def shown(port: int) -> str:
        context = ssl.create_default_context(cafile=str(authority.pem))
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        name: Any = writer.get_extra_info("peercert")["subject"]
        writer.close()
        await writer.wait_closed()
        return str(name[0][0][1])

    put(certificate)
    async with served(Access(tls=tls_of(files))) as (url, _):
        port = int(url.rsplit(":", 1)[1])
        assert await shown(port) == "server"
        put(newer, "tls_cert")  # the key does not belong to it yet
        assert await shown(port) == "server"
        put(newer, "tls_key")
        assert await shown(port) == "newer"
        put(expired)
        assert await shown(port) == "newer"


def test_an_expired_certificate_is_refused_at_the_start(expired: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="--ssl-certfile=.*certificate has expired"):
        tls_of(expired)


async def test_with_a_ca_for_clients_only_clients_with_its_certificate_are_served(
    authority: Authority, certificate: dict[str, str], expired: dict[str, str]
) -> None:
    async with served(Access(tls=tls_of(certificate, str(authority.pem)))) as (url, session):

        async def status_with(files: dict[str, str] | None) -> int:
            context = ssl.create_default_context(cafile=str(authority.pem))
            if files is not None:
                context.load_cert_chain(files["tls_cert"], files["tls_key"])
            return await status_of(session, f"{url}/health", ssl=context)

        assert await status_with(certificate) == 200
        for files in (None, expired):
            with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                await status_with(files)


# -- the router towards nodes --------------------------------------------------------------------------


@asynccontextmanager
async def secured_node(files: dict[str, str]) -> AsyncIterator[str]:
    """A fake node over https that asks for a key. It takes whatever certificate it is given."""
    keys = ApiKeys([("--api-key", KEY)])

    async def complete(request: web.Request) -> web.Response:
        if not has_key(request, keys):
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": None})

    app = web.Application()
    app.router.add_get("/health", answer)
    app.router.add_post("/v1/completions", complete)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files["tls_cert"], files["tls_key"])
    server = TestServer(app, scheme="https")
    await server.start_server(ssl=context)
    try:
        yield str(server.make_url("")).rstrip("/")
    finally:
        await server.close()


async def routed(
    files: dict[str, str], access: NodeAccess, key: str | None = None, *, passes_keys_on: bool = False
) -> tuple[int, str]:
    """Send one completion through a router to a node. Returns the status and the text of the answer."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(secured_node(files))
        router = Router(
            NodePool("prefill", [url]),
            NodePool("decode", [url]),
            answer_timeout_s=0,
            check_interval_s=60,
            check_timeout_s=5,
            decode_alone="never",
            node_access=access,
            passes_keys_on=passes_keys_on,
        )
        server = await stack.enter_async_context(TestServer(router.application()))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        ask = session.post(server.make_url("/v1/completions"), json={"prompt": "p"}, headers=headers)
        async with ask as response:
            return response.status, await response.text()


async def test_the_router_presents_its_own_key_to_nodes_whose_certificate_it_verifies(
    authority: Authority, certificate: dict[str, str]
) -> None:
    tls = ClientTls(str(authority.pem))
    assert (await routed(certificate, NodeAccess(OwnKey("v", KEY), tls), OTHER))[0] == 200
    assert (await routed(certificate, NodeAccess(tls=tls), KEY, passes_keys_on=True))[0] == 200
    assert (await routed(certificate, NodeAccess(tls=tls), KEY))[0] == 401


async def test_the_router_sends_nothing_to_a_node_whose_certificate_it_cannot_verify(
    authority: Authority, certificate: dict[str, str], expired: dict[str, str]
) -> None:
    for files, ca, reason in (
        (expired, str(authority.pem), "certificate has expired"),
        (certificate, "", "certificate verify failed"),
    ):
        status, text = await routed(files, NodeAccess(OwnKey("v", KEY), ClientTls(ca)))
        assert status == 503
        assert reason in text


def test_the_router_does_not_send_its_key_over_plain_http_beyond_loopback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVFERRY_NODE_API_KEY", KEY)
    urls = ["--prefill", "http://127.0.0.1:1", "--decode", "http://10.0.0.1:1"]
    assert router_main(["--port", "0", *urls]) == 2
    assert "http://10.0.0.1:1: the router does not send its key over plain HTTP" in capfd.readouterr().err


# -- limits --------------------------------------------------------------------------------------------


async def test_a_body_over_the_limit_of_the_options_is_answered_413() -> None:
    async with served(Access(), max_body_bytes=100) as (url, session):
        for body, status in (({"a": "b" * 50}, 200), ({"a": "b" * 100}, 413)):
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == status
        pieces = (piece for piece in (b'{"a": "', b"b" * 100, b'"}'))

        async def chunked() -> AsyncIterator[bytes]:
            for piece in pieces:
                yield piece

        async with session.post(f"{url}/v1/completions", data=chunked(), headers=JSON) as response:
            assert response.status == 413
            assert "--max-body-bytes" in (await response.json())["error"]["message"]


async def test_requests_beyond_those_that_are_answered_and_those_that_wait_are_answered_429() -> None:
    async with served(Access(), max_concurrent_requests=1, max_queued_requests=1) as (url, session):
        first, second = (Slow(), Slow())
        asked = []
        for slow in (first, second):
            asked.append(asyncio.create_task(_status_of_post(session, url, slow.body())))
            await asyncio.wait_for(slow.began.wait(), DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            while await status_of(session, f"{url}/ready") == 200:
                await asyncio.sleep(0.005)
        async with session.post(f"{url}/v1/completions", json={}) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert (await response.json())["error"]["code"] == "too_many_requests"
        for slow in (first, second):
            slow.may_end.set()
        assert await asyncio.gather(*asked) == [200, 200]
        assert await _status_of_post(session, url, b"{}") == 200


class Slow:
    """The body of a slow client."""

    def __init__(self) -> None:
        self.began, self.may_end = asyncio.Event(), asyncio.Event()

    async def body(self) -> AsyncIterator[bytes]:
        yield b"{"
        self.began.set()
        await self.may_end.wait()
        yield b"}"


async def _status_of_post(session: aiohttp.ClientSession, url: str, body: Any) -> int:
    async with session.post(f"{url}/v1/completions", data=body, headers=JSON) as response:
        return response.status


# -- admin endpoints -----------------------------------------------------------------------------------


async def test_admin_endpoints_are_served_only_on_their_own_port_and_only_with_their_own_key() -> None:
    drained: list[bool] = []
    server = NodeServer(Engine(EngineSettings()))
    admin = Admin(bind("127.0.0.1", 0), Access(ApiKeys([("v", OTHER)])))
    app = server.admin_application(lambda: drained.append(True), admin.port)
    async with (
        serving_admin(app, admin),
        TestServer(server.application()) as public,
        aiohttp.ClientSession() as session,
    ):
        assert await status_of(session, f"{public.make_url('/admin/requests')}", f"Bearer {OTHER}") == 404
        url = f"{admin.url}/admin/requests"
        assert [await status_of(session, url, key) for key in (None, f"Bearer {KEY}")] == [401, 401]
        assert await status_of(session, url, f"Bearer {OTHER}") == 200
        assert await status_of(session, f"{admin.url}/health") == 401
        async with session.get(public.make_url("/health")) as response:
            assert (await response.json())["admin_port"] == admin.port
        for key, status in ((KEY, 401), (OTHER, 202)):
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(f"{admin.url}/admin/drain", headers=headers) as response:
                assert response.status == status
    assert drained == [True]


async def test_admin_endpoints_of_dev_answer_programs_without_a_key_and_no_browser() -> None:
    parser = argparse.ArgumentParser()
    add_admin_arguments(parser)
    admin = admin_of(parser.parse_args(["--dev"]))
    assert admin is not None
    app = NodeServer(Engine(EngineSettings())).admin_application(lambda: None, admin.port)
    async with serving_admin(app, admin), aiohttp.ClientSession() as session:
        url = f"{admin.url}/admin/requests"
        assert await status_of(session, url) == 200
        for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
            async with session.get(url, headers=headers) as response:
                assert response.status == 403
                assert "evil.example" in await response.text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--admin-port", "0"], "--admin-port 0 needs a key"),
        (["--dev", "--admin-host", "0.0.0.0"], "--admin-host 0.0.0.0 must be an address of loopback"),
        (
            ["--admin-port", "0", "--admin-host", "0.0.0.0"],
            "--admin-host 0.0.0.0: beyond loopback this needs TLS",
        ),
    ],
)
def test_admin_endpoints_without_a_key_or_beyond_loopback_without_tls_are_refused(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--dev" not in words and "--admin-host" in words:
        monkeypatch.setenv(ADMIN_KEY_VARIABLE, KEY)
    with pytest.raises(StartupError, match=message):
        parse_arguments(words)


# -- pages in browsers ---------------------------------------------------------------------------------

#: What a client may say in `Host` and is no name, no address, or more than one.
ODD_HOSTS = [
    *("127.0.0.1:x", "127.0.0.1:-1", "127.0.0.1:65536", "127.0.0.1:99999", "127.0.0.1:1:2", "127.0.0.1: 80", "127.0.0.1:8_0"),
    *("localhost:٣", "localhost:+1", "localhost:0x50", "localhost:1e3", ":80", ":", "", ".", "..:x", "@", "a@b", "user:pw@localhost"),
    *("[", "]", "[]", "[::1", "::1", "::1]", "[::1]x", "[::1]:x", "[1]", "[::1::2]", "[:::]", "[v1.a]", "[::1%25lo]", "[o]", "@[o]@"),
    *("a b", "a/b", "/", "//", "a?b", "a#b", "a\\b", "a,b", "localhost, localhost", "a;b", "a%b", "a%00b", "%", "a'b", 'a"b'),
    *("<a>", "{a}", "a|b", "a^b", "a`b", "http://localhost", "é", "ü.example", "字", "a\x7fb", "$(id)", "*", "!", "~", "=", "&", "a+b"),
]  # fmt: skip


def router_without_nodes(admin_keys: ApiKeys | None) -> Router:
    return Router(
        NodePool("prefill", []),
        NodePool("decode", []),
        answer_timeout_s=0,
        check_interval_s=60,
        check_timeout_s=5,
        decode_alone="never",
        admin_keys=admin_keys,
    )


async def raw_status(port: int, head: str) -> int:
    """Return the status of the answer to a request that no HTTP library would send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode(errors="surrogateescape"))
        async with asyncio.timeout(DEADLINE_S):
            return int((await reader.readline()).split()[1])
    finally:
        writer.close()


async def test_no_odd_host_is_an_error_of_the_server() -> None:
    router = router_without_nodes(ApiKeys())
    admin = Admin(bind("127.0.0.1", 0), Access())
    app = router.admin_application(lambda: None, admin.port)
    with bind("127.0.0.1", 0) as listener:
        async with serving_admin(app, admin), serving(router.application(), listener, ConnectionLimits()):
            port = listener.getsockname()[1]
            for host in ODD_HOSTS:
                for where, path in (
                    (port, "/page/explain?request=a"),
                    (port, "/health"),
                    (admin.port, "/admin/requests"),
                ):
                    head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
                    assert await raw_status(where, head) == 400, (host, path)
            twice = "GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n"
            assert await raw_status(port, twice) == 400


ANY, KEYED = None, ApiKeys([("v", KEY)])
OWN_NAMES = [
    *("127.0.0.1", "localhost", "LOCALHOST:8000", "localhost.", "127.0.0.2:1"),
    *("[::1]:8000", "[0:0:0:0:0:0:0:1]"),
]
OTHER_NAMES = ["evil.example", "10.0.0.1:80", "localhost.evil"]
OTHER_ORIGINS = ["https://evil.example", "null", "http://localhost:1", "file://", "http://127.0.0.1", ""]
JSON_TYPES = ["application/json", "application/json; charset=utf-8", "Application/JSON"]
#: A page in a browser may send these to any server without asking it first.
OTHER_TYPES = [
    *("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"),
    *("text/plain; a=application/json", "application/jsonp", ""),
]
#: Access, headers → the status of a request. A website can let its own name lead to 127.0.0.1. To the browser
#: the server is then a part of that site. `URL` and `HOST` are those of the server.
REQUESTS: list[tuple[Access, dict[str, str], int]] = [
    *((Access(), {"Host": host}, 200) for host in OWN_NAMES),
    *((Access(), {"Host": host}, 403) for host in OTHER_NAMES),
    *((Access(KEYED), {"Host": host}, 200) for host in (*OWN_NAMES, *OTHER_NAMES)),
    (Access(names=frozenset({"own.example"})), {"Host": "own.example:8000"}, 200),
    (Access(names=ANY), {"Host": "own.example:8000"}, 200),
    (Access(names=frozenset({"another"})), {"Host": "own.example:8000"}, 403),
    *((Access(), {"Origin": origin}, 403) for origin in OTHER_ORIGINS),
    *((Access(KEYED), {"Origin": origin}, 200) for origin in OTHER_ORIGINS),
    (Access(names=ANY), {"Origin": "URL", "Host": "HOST"}, 200),
    (Access(names=ANY), {"Origin": "https://ui.example", "Host": "ui.example"}, 200),
    (Access(names=ANY), {"Origin": "http://localhost", "Host": "localhost:80"}, 200),
    *((Access(), {"Content-Type": kind}, 200) for kind in JSON_TYPES),
    *((Access(), {"Content-Type": kind}, 415) for kind in OTHER_TYPES),
]


@pytest.mark.parametrize(("access", "headers", "status"), REQUESTS)
async def test_a_request_is_answered_by_its_host_origin_and_type(
    access: Access, headers: dict[str, str], status: int
) -> None:
    async with served(access) as (url, session):
        own = {"URL": url, "HOST": url.removeprefix("http://")}
        sent = {"Authorization": f"Bearer {KEY}", **JSON}
        sent |= {name: own.get(value, value) for name, value in headers.items()}
        async with session.post(f"{url}/v1/completions", data=b"{}", headers=sent) as response:
            text = await response.text()
    assert response.status == status
    assert status != 415 or "send the body with 'Content-Type: application/json'" in text
    assert status != 403 or "Origin" in headers or "--insecure-http" in text


@pytest.mark.parametrize(
    ("words", "names"),
    [([], {"127.0.0.1"}), (["--host", "localhost"], {"localhost"}), (["--insecure-http"], None)],
    ids=["default", "--host", "--insecure-http"],
)
def test_the_options_name_the_server(words: list[str], names: set[str] | None) -> None:
    parser = argparse.ArgumentParser()
    add_serving_arguments(parser, port=0)
    assert access_of(parser.parse_args(words)).names == names


ORIGIN = "https://chat.example"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


@pytest.mark.parametrize("keys", [ApiKeys(), KEYED], ids=["no key", "a key"])
async def test_pages_of_allowed_origins_may_use_a_server_and_others_may_not(keys: ApiKeys) -> None:
    async with served(Access(keys, origins=frozenset({ORIGIN}))) as (url, session):
        for origin, is_allowed in ((ORIGIN, True), ("https://evil.example", False), ("null", False)):
            named = {"Origin": origin}
            path = f"{url}/v1/completions"
            async with session.options(path, headers={**named, **PREFLIGHT}) as response:
                assert (response.status == 204) is is_allowed
                assert response.headers.get("Access-Control-Allow-Methods") == (
                    "POST" if is_allowed else None
                )
            key = {"Authorization": f"Bearer {KEY}"}
            async with session.post(path, data=b"{}", headers={**JSON, **key, **named}) as response:
                assert response.status == (200 if is_allowed or keys else 403)
                assert response.headers.get("Access-Control-Allow-Origin") == (origin if is_allowed else None)
        async with session.post(
            f"{url}/v1/completions", data=b"{}", headers={**JSON, "Origin": ORIGIN}
        ) as response:
            assert response.status == (401 if keys else 200)
            assert response.headers["Access-Control-Allow-Origin"] == ORIGIN  # the page can read the error


async def test_without_allowed_origins_no_preflight_is_answered() -> None:
    async with served(Access(KEYED)) as (url, session):
        headers = {"Origin": ORIGIN, **PREFLIGHT}
        async with session.options(f"{url}/v1/completions", headers=headers) as response:
            assert response.status == 401
            assert not [name for name in response.headers if name.startswith("Access-Control")]


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://a b", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    parser = argparse.ArgumentParser()
    add_serving_arguments(parser, port=0)
    with pytest.raises(ConfigurationError, match="--allowed-origins has .* which is no origin"):
        access_of(parser.parse_args(["--allowed-origins", origin]))


async def test_elsewhere_a_server_answers_to_every_name() -> None:
    """Probes of Kubernetes call it by an address, and Prometheus by the name of a service."""
    app = web.Application(middlewares=[error_middleware])
    app.router.add_get("/health", answer)
    with bind("0.0.0.0", 0) as listener:
        async with serving(app, listener, ConnectionLimits()), aiohttp.ClientSession() as session:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/health"
            for host in ("10.1.2.3:8000", "router.default.svc", "my_service"):
                async with session.get(url, headers={"Host": host}) as response:
                    assert response.status == 200


@pytest.mark.parametrize(
    ("admin_keys", "key", "status"),
    [
        (None, KEY, 403),
        (ApiKeys([("v", OTHER)]), KEY, 401),
        (ApiKeys([("v", OTHER)]), OTHER, 200),
        (ApiKeys(), None, 200),
    ],
    ids=["no admin endpoints", "a client's key", "the admin key", "dev"],
)
async def test_the_page_explains_requests_to_those_who_may_ask_the_admin_endpoints(
    admin_keys: ApiKeys | None, key: str | None, status: int
) -> None:
    router = router_without_nodes(admin_keys)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with TestServer(router.application()) as server, aiohttp.ClientSession() as session:
        async with session.get(server.make_url("/page/explain?request=a"), headers=headers) as response:
            assert response.status == status
