"""CURVE: a node with the right keys is served, and no other peer gets a byte of the pool."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvferry.transports import Connected, Endpoint, Event, Pool
from kvferry.transports.base import PeerLost
from kvferry.transports.errors import ConfigurationError, PeerLostError, PeerRefusedError
from kvferry.transports.zeromq import ZeroMQTransport
from kvferry.transports.zeromq.options import Address
from kvferry.transports.zeromq.wire import Hello

Make = Callable[..., Endpoint]
Options = dict[str, Any]


@pytest.fixture
def make() -> Iterator[Make]:
    """A function that opens endpoints; all of them are closed at the end."""
    with ExitStack() as stack:

        def make_one(options: Options) -> Endpoint:
            transport = ZeroMQTransport(options)
            stack.callback(transport.close)
            arena = transport.allocate(4096)
            stack.callback(lambda: arena)  # the memory outlives the transport
            return transport.register(Pool([arena.segment]))

        yield make_one


class Keys:
    """Writes key files as a user would."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pairs = {name: zmq.curve_keypair() for name in ("producer", "consumer", "stranger")}

    def _write(self, name: str, content: bytes) -> str:
        path = self._folder / name
        path.write_bytes(content)
        path.chmod(0o600)
        return str(path)

    def shared(self, secret: str = "one secret for all of the nodes") -> Options:
        return {"curve": "on", "shared_secret_file": self._write(f"shared {hash(secret)}", secret.encode())}

    def own(self, name: str, *allowed: str) -> Options:
        lines = [b"# nodes that may connect", *(self.pairs[other][0] for other in allowed), b""]
        return {
            "curve": "on",
            "curve_secret_key_file": self._write(f"{name}.key", self.pairs[name][1] + b"\n"),
            "curve_allowed_keys_file": self._write(f"{name}.allowed", b"\n".join(lines)),
        }

    def options(self, words: str) -> Options:
        """Return options by name, or those of a node with the names of the nodes that it allows."""
        named: dict[str, Options] = {
            "plaintext": {"curve": "off"},
            "shared": self.shared(),
            "shared differently": self.shared("another secret of sixteen bytes"),
        }
        return named[words] if words in named else self.own(*words.split())


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


def outcome(server: Endpoint, client: Endpoint, address: str) -> tuple[Event, list[Event]]:
    """Connect, and return what the client sees and everything that its server sees."""
    client.start_connect(address, timeout_s=3)
    seen: list[Event] = []
    while not (events := client.wait_events(0.02)):
        seen += server.wait_events(0.02)
    return events[0], seen


#: How the listener and the node that connects are started; whether the address names the listener's key,
#: another's, or none; and whether the node is admitted.
ADMISSIONS: dict[str, tuple[str, str, str, bool]] = {
    "the same secret": ("shared", "shared", "its own", True),
    "another secret": ("shared", "shared differently", "its own", False),
    "keys that allow each other": ("producer stranger consumer", "consumer producer", "its own", True),
    "a node that is not allowed": ("producer consumer", "stranger producer", "its own", False),
    # An address comes over a path that is not authenticated, so a key in it proves nothing.
    "a listener that is not allowed": ("stranger consumer", "consumer producer", "its own", False),
    "a listener without the key of its address": ("stranger consumer", "consumer producer", "another's", False),
    "plaintext to a key": ("shared", "plaintext", "its own", False),
    "plaintext to an address without its key": ("shared", "plaintext", "none", False),
    "a key to plaintext, a downgrade": ("plaintext", "shared", "its own", False),
}  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "ours", "names", "is_admitted"), ADMISSIONS.values(), ids=ADMISSIONS.keys()
)
def test_a_node_is_admitted_by_its_key(
    make: Make, keys: Keys, theirs: str, ours: str, names: str, is_admitted: bool
) -> None:
    """A node that is not gets nothing, and its listener reports nothing."""
    server, client = make(keys.options(theirs)), make(keys.options(ours))
    address = Address.parse(server.listen(""))
    if names != "its own":
        other = Address.parse(make(keys.own("producer", "consumer")).listen(""))
        address = Address(address.host, address.port, other.server_key if names == "another's" else b"")
    event, seen = outcome(server, client, str(address))
    if is_admitted:
        assert isinstance(event, Connected)
        return
    assert isinstance(event, PeerLost)
    assert isinstance(event.error, PeerRefusedError) or (
        names == "another's" and isinstance(event.error, PeerLostError)
    )
    assert seen == []


def test_a_refusal_is_logged_with_the_address(
    make: Make, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    server = make(keys.own("producer", "consumer"))
    outcome(server, make(keys.own("stranger", "producer")), server.listen(""))
    assert "127.0.0.1" in caplog.text


def test_without_the_right_key_not_one_byte_of_ours_is_received(make: Make, keys: Keys) -> None:
    """A client whose CURVE handshake is valid, but whose key is not allowed, sends a hello and a fetch."""
    server = make(keys.own("producer", "consumer"))
    address = Address.parse(server.listen(""))
    hello = Hello(1, (4096,))
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.curve_serverkey = keys.pairs["producer"][0]
        client.curve_publickey, client.curve_secretkey = keys.pairs["stranger"]
        client.connect(address.endpoint)
        client.send_multipart([hello.head(), hello.body()])
        for _ in range(25):
            assert server.wait_events(0.02) == []
        assert client.poll(0) == 0


@pytest.mark.parametrize(
    ("options", "remedy"), [({}, "shared_secret_file"), ({"curve": "off"}, "allow_plaintext")]
)
def test_beyond_loopback_keys_are_needed_or_plaintext_is_allowed(
    make: Make, options: Options, remedy: str
) -> None:
    server = make({"bind_host": "0.0.0.0", "advertise_host": "node-1", **options})
    with pytest.raises(ConfigurationError, match=remedy) as caught:
        server.listen("")
    assert caught.value.key == "curve"


def test_beyond_loopback_encryption_is_on_by_itself(make: Make, keys: Keys) -> None:
    options = {**keys.shared(), "curve": "auto"}
    server = make({**options, "bind_host": "0.0.0.0", "advertise_host": "127.0.0.1"})
    address = server.listen("")
    assert Address.parse(address).server_key
    event, _ = outcome(server, make(options), address)
    assert isinstance(event, Connected)


def test_no_peer_connects_beyond_loopback_without_encryption(make: Make) -> None:
    client = make({})
    peer_id = client.start_connect("zeromq://192.0.2.1:5555", timeout_s=3)
    (lost,) = client.wait_events(1)
    assert isinstance(lost, PeerLost)
    assert lost.peer_id == peer_id
    assert isinstance(lost.error, PeerRefusedError)


class TestFiles:
    @pytest.mark.parametrize(
        ("change", "words", "key"),
        [
            (lambda keys: {"shared_secret_file": "/none/such"}, "/none/such", "shared_secret_file"),
            (lambda keys: keys.shared("too short"), "16 bytes", "shared_secret_file"),
            (
                lambda keys: {**keys.own("producer"), "curve_allowed_keys_file": ""},
                "go together",
                "curve_allowed_keys_file",
            ),
            (lambda keys: {**keys.own("producer"), **keys.shared()}, "exclude", "shared_secret_file"),
        ],
        ids=["missing", "too short", "one of two", "two kinds"],
    )
    def test_a_file_that_cannot_be_used_is_named(
        self, keys: Keys, change: Callable[[Keys], Options], words: str, key: str
    ) -> None:
        with pytest.raises(ConfigurationError, match=words) as caught:
            ZeroMQTransport(change(keys))
        assert caught.value.key == key

    def test_a_malformed_key_is_refused_and_not_shown(self, keys: Keys) -> None:
        options = keys.own("producer", "consumer")
        secret = "not a key, but still a secret"
        Path(options["curve_secret_key_file"]).write_text(secret)
        with pytest.raises(ConfigurationError) as caught:
            ZeroMQTransport(options)
        assert caught.value.key == "curve_secret_key_file"
        assert secret not in repr(caught.value)

    @pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
    @pytest.mark.parametrize("key", ["shared_secret_file", "curve_secret_key_file"])
    def test_a_secret_that_others_can_use_is_refused(self, keys: Keys, key: str, mode: int) -> None:
        options = {**keys.shared(), **keys.own("producer")}
        del options["curve_secret_key_file" if key == "shared_secret_file" else "shared_secret_file"]
        if key == "shared_secret_file":
            del options["curve_allowed_keys_file"]
        path = Path(options[key])
        path.chmod(mode)
        with pytest.raises(ConfigurationError, match=f"chmod 600 {path}") as caught:
            ZeroMQTransport(options)
        assert caught.value.key == key
        path.chmod(0o400)
        ZeroMQTransport(options).close()

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
    def test_a_secret_of_another_user_is_refused(self, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
        options = keys.shared()
        os.chown(options["shared_secret_file"], 12345, -1)
        with pytest.raises(ConfigurationError, match="user 12345"):
            ZeroMQTransport(options)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        ZeroMQTransport(options).close()
        os.chown(options["shared_secret_file"], 0, -1)
        ZeroMQTransport(options).close()

    def test_public_keys_may_be_read_by_all(self, keys: Keys) -> None:
        options = keys.own("producer", "consumer")
        Path(options["curve_allowed_keys_file"]).chmod(0o644)
        ZeroMQTransport(options).close()

    def test_no_secret_is_logged_or_shown(
        self, make: Make, keys: Keys, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        server = make(keys.own("producer", "consumer"))
        address = server.listen("")
        outcome(server, make(keys.own("stranger", "producer")), address)
        secret = keys.pairs["producer"][1].decode()
        assert secret not in caplog.text + address + repr(server) + repr(server._backend._security._keys)


def test_a_client_that_says_nothing_is_hung_up_on(make: Make, keys: Keys) -> None:
    server = make({**keys.shared(), "handshake_timeout_s": 0.2})
    address = Address.parse(server.listen(""))
    with socket.create_connection((address.host, address.port)) as client:
        client.setblocking(False)
        received = b"?"
        while received:
            assert server.wait_events(0.02) == []
            try:
                received = client.recv(4096)  # libzmq's greeting, then the end
            except BlockingIOError:
                pass
