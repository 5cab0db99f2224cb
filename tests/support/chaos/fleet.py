"""Prefill nodes, decode nodes, and two routers in front of them, at addresses that outlive them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from reference.demo.launcher import Spawn

from .schedule import Fault, Kind
from .services import Service, reserved_port

START_TIMEOUT_S = 110.0
#: Deadlines such that a pause may outlast each of them, or none.
TIMING = {
    "lease_s": 5,
    "heartbeat_s": 1,
    "connect_timeout_s": 3,
    "claim_timeout_s": 4,
    "read_timeout_s": 3,
    "progress_wait_s": 4,
    "load_wait_s": 10,
}
#: Over the network a load takes a while, so that faults happen in the middle of it.
SMALL_SLICES = 'transport_options={"slice_bytes": 65536, "window_slices": 1}'


class Fleet:
    """Two prefill nodes, two decode nodes, two routers (one of which overlaps).

    One decode node computes what it cannot load; the other one fails such requests.

    Args:
        arguments: Of every node.
        folder: For sockets; with a short path.
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
            self.routers = [self._router("router-whole", ()), self._router("router-overlap", ("--overlap",))]
            self._resources = self._resources.pop_all()

    @property
    def nodes(self) -> list[Service]:
        return [*self.prefills, *self.decodes]

    @property
    def services(self) -> dict[str, Service]:
        """All, by name."""
        return {service.name: service for service in (*self.nodes, *self.routers)}

    @property
    def kinds(self) -> Mapping[str, Sequence[Kind]]:
        """What can befall whom."""
        of_node: tuple[Kind, ...] = ("kill", "terminate", "pause", "pause", "pause")
        cuts: tuple[Kind, ...] = ("cut",) if self._transport == "shm" else ()
        nodes = {node.name: of_node + cuts for node in self.prefills} | {
            node.name: of_node for node in self.decodes
        }
        return nodes | {router.name: ("kill", "terminate") for router in self.routers}

    def start(self) -> None:
        """Fill every service, and wait until all serve."""
        for service in self.services.values():
            service.start()
            self._resources.callback(service.close)
        self._resources.callback(self._terminate)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until all serve.

        Raises:
            LaunchError: one does not, or died of something that was no fault of the run.
        """
        for service in self.services.values():
            service.wait_ready(START_TIMEOUT_S)
            service.require_alive()

    def begin(self, fault: Fault) -> None:
        """Let a fault happen.

        Raises:
            LaunchError: its target died of something else.
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
        """Mend what it broke."""
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
        """Ask all to end, so that nobody who is waited for begins with it only then."""
        for service in self.services.values():
            service.terminate()
            service.go_on()

    # -- services ----------------------------------------------------------------------------------------

    def _node(self, name: str, role: str, arguments: Sequence[str]) -> Service:
        folder = self._folder / name
        folder.mkdir()
        address = _option_words(self._address(folder))
        # A peer that is paused meanwhile takes nothing, and a run must not wait for the node as long as users would.
        words = ("--role", role, "--drain-timeout-s", "5", *arguments, *address)
        return Service(name, self._spawn, "serve.py", words, self._port(), folder)

    def _router(self, name: str, arguments: Sequence[str]) -> Service:
        nodes = [("--prefill", node) for node in self.prefills] + [
            ("--decode", node) for node in self.decodes
        ]
        urls = [word for option, node in nodes for word in (option, f"http://127.0.0.1:{node.port}")]
        words = (*urls, "--check-interval-s", "0.25", "--drain-timeout-s", "3", *arguments)
        return Service(name, self._spawn, "router.py", words, self._port(), self._folder / name)

    def _address(self, folder: Path) -> list[str]:
        """The option that says where a node's transport listens, each time; none where the transport is to choose."""
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._resources.close()


def _option_words(options: Iterable[str]) -> list[str]:
    return [word for option in options for word in ("--connector-option", option)]
