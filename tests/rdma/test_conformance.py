"""`ucx` and `nixl` keep every promise of a transport over RDMA verbs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import ClassVar

import pytest

from kvferry.transports import Transport
from kvferry.transports.registry import create_transport
from tests.transports import test_nixl, test_ucx

from .conftest import OWNER, READER, options_of

Create = Callable[[Mapping[str, object]], Transport]


def creator(scheme: str) -> Create:
    """Return what makes transports. They use the two devices in turn, so two nodes are connected by the wire."""
    devices = itertools.cycle((OWNER, READER))

    def create(options: Mapping[str, object]) -> Transport:
        return create_transport(scheme, {**options_of(scheme, next(devices)), **options})

    return create


class TestUCX(test_ucx.TestUCX):
    deadline_s: ClassVar[float] = 60.0

    @pytest.fixture
    def create(self) -> Create:
        return creator("ucx")


class TestNIXL(test_nixl.NIXLConformance):
    deadline_s: ClassVar[float] = 60.0

    @pytest.fixture
    def create(self) -> Create:
        return creator("nixl")
