"""The `nixl` transport keeps every promise of a transport, over shared memory and over TCP."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, ClassVar

import pytest

from kvferry.transports import Guard, Transport
from kvferry.transports.nixl import NIXLTransport
from kvferry.transports.nixl.library import Agent
from kvferry.transports.testing import TransportConformance, World, connect_tcp

if find_spec("nixl_cu12") is None and find_spec("nixl_cu13") is None:
    pytest.skip("NIXL is not installed", allow_module_level=True)

Create = Callable[[Mapping[str, object]], Transport]

TCP: dict[str, Any] = {"refuse_tcp": False, "tls": "tcp"}


@contextmanager
def after_checks(guard: Guard, then: Callable[[], None]) -> Iterator[None]:
    """Call a function after each look at a guard's word, which NIXL has copied, in which the guard held."""
    load = Agent.load

    def load_and_call(agent: Agent, address: int) -> int:
        value = load(agent, address)
        if value == guard.value:
            then()
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agent, "load", load_and_call)
        yield


class NIXLConformance(TransportConformance):
    options: ClassVar[dict[str, Any]] = {}

    @pytest.fixture
    def create(self) -> Create:
        return lambda options={}: NIXLTransport({**self.options, **options})

    @pytest.fixture
    def on_guard_check(self) -> Any:
        return after_checks

    @pytest.fixture
    def connect_raw(self) -> Any:
        return connect_tcp

    read_unchecked = None  # the owner sees no reads


class TestOnOneHost(NIXLConformance):
    pass


class TestOverTCP(NIXLConformance):
    options = TCP


@pytest.mark.parametrize("host", ["::1", "localhost"])
def test_hosts_may_be_ipv6_or_names(make_world: Callable[..., World], host: str) -> None:
    world = make_world("nixl", **TCP, bind_host=host)
    world.link(world.node(4096), world.node(4096))
