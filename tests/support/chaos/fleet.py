"""Prefill nodes, decode nodes, and two routers in front of them, at fixed addresses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from kvferry.lab.servers import Spawn

from .schedule import Fault, Kind
from .services import Service, reserved_port

START_TIMEOUT_S = 110.0
#: Deadlines chosen so that a pause may outlast each of them, or none.
TIMING = {
    "lease_s": 5,
    "connect_timeout_s": 3,
    "claim_timeout_s": 4,
    "read_timeout_s": 3,
    "load_wait_s": 10,
}
#: Small slices make loads over the network slow, so that faults hit in the middle.
SMALL_SLICES = 'transport_options={"slice_bytes": 65536, "window_slices": 1}'


class Fleet:
    """Two prefill nodes, two decode nodes, and two routers, one of which asks prefill and decode one after
    the other.

    One decode node computes what it cannot load; the other one fails such requests.

    Args:
        arguments: Options of every node.
        folder: Folder for sockets. Its path must be short.
    """

    def __init__(self, spawn: Spawn, transport: str, arguments: Sequence[str], folder: Path) -> None:
        self._spawn = spawn
        self._transport = transport
        self._folder = folder
        self._resources = ExitStack()
        options = [f"{key}={value}" for key, value in TIMING.items()]
        if transport in ("zeromq", "ucx"):
            options.append(SMALL_SLICES)
        common = (*arguments, "--connector", transport, *_option_words(options))
        with self._resources:
            self.prefills = [self._node(f"prefill-{index}", "prefill", common) for index in range(2)]
            self.decodes = [
                self._node("decode-recompute", "decode", common),
                self._node("decode-fail", "decode", (*common, "--load-failure-policy", "fail")),
            ]
            in_turn = ("--rendezvous", "off")
            self.routers = [self._router("router", ()), self._router("router-in-turn", in_turn)]
            self._resources = self._resources.pop_all()

    @property
    def nodes(self) -> list[Service]:
        return [*self.prefills, *self.decodes]

    @property
    def services(self) -> dict[str, Service]:
        """All nodes and routers, by name."""
        return {service.name: service for service in (*self.nodes, *self.routers)}

    @property
    def ours(self) -> list[Service]:
        """Services whose logs are kvferry's alone, in which an injected fault causes no error."""
        return list(self.services.values())

    @property
    def kinds(self) -> Mapping[str, Sequence[Kind]]:
        """The kinds of faults for each target."""
        of_node: tuple[Kind, ...] = ("kill", "terminate", "pause", "pause", "pause")
        cuts: tuple[Kind, ...] = ("cut",) if self._transport == "shm" else ()
        nodes = {node.name: of_node + cuts for node in self.prefills} | {
            node.name: of_node for node in self.decodes
        }
        return nodes | {router.name: ("kill", "terminate") for router in self.routers}

    def start(self) -> None:
        """Start every service, and wait until all are ready."""
        for service in self.services.values():
            self._resources.enter_context(service)
        self._resources.callback(self._terminate)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until all services are ready.

        Raises:
            LaunchError: A service is not ready in time, or ended by itself.
        """
        for service in self.services.values():
            service.wait_ready(START_TIMEOUT_S)
            service.require_alive()

    def begin(self, fault: Fault) -> None:
        """Inject a fault.

        Raises:
            LaunchError: Its target had already ended by itself.
        """
        service = self.services[fault.target]
        service.require_alive()
        match fault.kind:
            case "kill":
                service.kill()
            case "terminate":
                service.terminate()
            case "pause":
                service.pause()
            case "cut":
                service.cut_off()

    def end(self, fault: Fault) -> None:
        """End a fault: restart or resume its target."""
        service = self.services[fault.target]
        match fault.kind:
            case "kill":
                service.start()
            case "terminate":
                service.await_end()
                service.start()
            case "pause":
                service.go_on()
            case "cut":
                service.join_again()

    def _terminate(self) -> None:
        """Send SIGTERM to all services first, so that they end at the same time and not one after another."""
        for service in self.services.values():
            service.terminate()
            service.go_on()

    # -- making services -------------------------------------------------------------------------------

    def _node(self, name: str, role: str, arguments: Sequence[str]) -> Service:
        folder = self._folder / name
        folder.mkdir()
        address = _option_words(self._address(folder))
        # A drain waits for paused peers. Keep it short, because the run waits for the node.
        words = ("--role", role, "--drain-timeout-s", "5", *arguments, *address)
        return Service(name, self._spawn, "serve", words, folder)

    def _router(self, name: str, arguments: Sequence[str]) -> Service:
        nodes = [("--prefill", node) for node in self.prefills] + [
            ("--decode", node) for node in self.decodes
        ]
        urls = [word for option, node in nodes for word in (option, f"http://127.0.0.1:{node.port}")]
        words = (*urls, "--check-interval-s", "0.25", "--drain-timeout-s", "3", *arguments)
        return Service(name, self._spawn, "router", words, self._folder / name)

    def _address(self, folder: Path) -> list[str]:
        """Return the option for the fixed address of a node's transport.

        Empty if the transport chooses one.
        """
        match self._transport:
            case "shm":
                return [f"address=shm://{folder}/berth.sock"]
            case "zeromq" | "ucx":
                return [f"address={self._transport}://127.0.0.1:{self._port()}"]
            case _:
                return []

    def _port(self) -> int:
        return self._resources.enter_context(reserved_port())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._resources.close()


def _option_words(options: Iterable[str]) -> list[str]:
    return [word for option in options for word in ("--connector-option", option)]
