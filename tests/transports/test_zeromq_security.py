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


def test_a_shared_secret_lets_its_holders_in(make: Make, keys: Keys) -> None:
    server = make(keys.shared())
    event, _ = outcome(server, make(keys.shared()), server.listen(""))
    assert isinstance(event, Connected)


def test_key_files_admit_the_nodes_that_they_list(make: Make, keys: Keys) -> None:
    server = make(keys.own("producer", "stranger", "consumer"))
    event, _ = outcome(server, make(keys.own("consumer", "producer")), server.listen(""))
    assert isinstance(event, Connected)


def test_a_key_that_is_not_allowed_is_refused(
    make: Make, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    server = make(keys.own("producer", "consumer"))
    event, seen = outcome(server, make(keys.own("stranger", "producer")), server.listen(""))
    assert isinstance(event, PeerLost)
    assert isinstance(event.error, PeerRefusedError)
    assert seen == []
    assert "127.0.0.1" in caplog.text


def test_an_imposter_is_refused_before_anything_is_sent(make: Make, keys: Keys) -> None:
    """An address comes over a path that is not authenticated, so a key in it proves nothing."""
    server = make(keys.own("stranger", "consumer"))
    event, seen = outcome(server, make(keys.own("consumer", "producer")), server.listen(""))
    assert isinstance(event, PeerLost)
    assert isinstance(event.error, PeerRefusedError)
    assert seen == []


def test_a_wrong_server_key_never_connects(make: Make, keys: Keys) -> None:
    """The address contains the key of an allowed node, but another node answers there."""
    address = Address.parse(make(keys.own("producer", "consumer")).listen(""))
    other = make(keys.own("stranger", "consumer"))
    there = Address.parse(other.listen(""))
    forged = str(Address(there.host, there.port, address.server_key))
    event, seen = outcome(other, make(keys.own("consumer", "producer")), forged)
    assert isinstance(event, PeerLost)
    assert isinstance(event.error, PeerRefusedError | PeerLostError)
    assert seen == []


def test_another_shared_secret_is_refused(make: Make, keys: Keys) -> None:
    server = make(keys.shared())
    event, seen = outcome(server, make(keys.shared("another secret of sixteen bytes")), server.listen(""))
    assert isinstance(event, PeerLost)
    assert isinstance(event.error, PeerRefusedError)
    assert seen == []


@pytest.mark.parametrize("has_key", [True, False])
def test_plaintext_to_an_encrypted_node_gets_nothing(make: Make, keys: Keys, has_key: bool) -> None:
    server = make(keys.shared())
    address = Address.parse(server.listen(""))
    asked = str(Address(address.host, address.port, address.server_key if has_key else b""))
    event, seen = outcome(server, make({"curve": "off"}), asked)
    assert isinstance(event, PeerLost)
    assert isinstance(event.error, PeerRefusedError)
    assert seen == []


def test_a_downgrade_is_refused(make: Make, keys: Keys) -> None:
    """The key was removed from the address."""
    server = make({})
    event, seen = outcome(server, make(keys.shared()), server.listen(""))
    assert isinstance(event, PeerLost)
    assert isinstance(event.error, PeerRefusedError)
    assert seen == []


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


def test_beyond_loopback_keys_are_needed(make: Make) -> None:
    server = make({"bind_host": "0.0.0.0", "advertise_host": "node-1"})
    with pytest.raises(ConfigurationError, match="shared_secret_file") as caught:
        server.listen("")
    assert caught.value.key == "curve"


def test_beyond_loopback_plaintext_must_be_asked_for_twice(make: Make) -> None:
    with pytest.raises(ConfigurationError, match="allow_plaintext"):
        make({"bind_host": "0.0.0.0", "advertise_host": "node-1", "curve": "off"}).listen("")


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
    def test_a_missing_file_is_named(self) -> None:
        with pytest.raises(ConfigurationError, match="/none/such") as caught:
            ZeroMQTransport({"shared_secret_file": "/none/such"})
        assert caught.value.key == "shared_secret_file"

    def test_a_short_secret_is_refused(self, keys: Keys) -> None:
        with pytest.raises(ConfigurationError, match="16 bytes"):
            ZeroMQTransport(keys.shared("too short"))

    def test_the_key_files_go_together(self, keys: Keys) -> None:
        options = keys.own("producer")
        del options["curve_allowed_keys_file"]
        with pytest.raises(ConfigurationError, match="go together"):
            ZeroMQTransport(options)

    def test_two_kinds_of_keys_are_refused(self, keys: Keys) -> None:
        with pytest.raises(ConfigurationError, match="exclude"):
            ZeroMQTransport({**keys.own("producer"), **keys.shared()})

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
