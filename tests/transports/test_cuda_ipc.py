"""`shm` with pools on a GPU and a stand-in for CUDA's driver.

The tests that need a GPU are in `tests/gpu`.
"""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.transports import cuda_copies, cuda_driver
from kvferry.transports.auto import AutoTransport
from kvferry.transports.auto.address import AutoAddress
from kvferry.transports.base import Arena, PeerLost, Route, Transport
from kvferry.transports.errors import (
    BackendUnavailableError,
    ConfigurationError,
    IncompatiblePeerError,
    KVTransferError,
    PeerLostError,
    RegionError,
    TransportError,
)
from kvferry.transports.regions import Guard, Pool, Segment
from kvferry.transports.registry import create_transport
from kvferry.transports.shm import SharedMemoryTransport, cuda
from kvferry.transports.shm.cuda import CudaDevice
from kvferry.transports.shm.cuda_pools import RemoteCudaMemory
from kvferry.transports.shm.hello import Hello
from kvferry.transports.testing import TransportConformance, World, pairs_of
from kvferry.transports.testing.harness import Link, Node
from tests.support.cuda_stand_in import CudaDriverStandIn, CUresult
from tests.support.peers import peers, said

ROOT, PEER = Path(__file__).parents[2], "tests.transports.children.network_peer"
PAGE = 4096
HELD = Guard(3, 9)
SCATTERED = pairs_of(*((slot * PAGE, slot * PAGE, 100) for slot in range(64)))

Create = Callable[[Mapping[str, object]], Transport]
MakeNode = Callable[..., Node]


class OnGpu(SharedMemoryTransport):
    """A transport whose arenas are memory of the stand-in's GPU, as if an engine's framework had allocated
    it.
    """

    def __init__(self, driver: CudaDriverStandIn, gpu: int, options: Mapping[str, object] = {}) -> None:
        super().__init__(options)
        self._driver, self._gpu = driver, gpu

    def allocate(self, num_bytes: int) -> Arena:
        self._require_open()
        return self._driver.allocate(num_bytes, self._gpu)


@pytest.mark.option
class TestOnOneGpu(TransportConformance):
    read_unchecked = connect_raw = None  # the same as for main memory

    @pytest.fixture
    def create(self, driver: CudaDriverStandIn) -> Create:
        return lambda options: OnGpu(driver, 0, options)


@pytest.mark.option
class TestBetweenTwoGpusWithTwoCopiers(TransportConformance):
    read_unchecked = connect_raw = None

    @pytest.fixture
    def create(self, driver: CudaDriverStandIn) -> Create:
        gpus = itertools.cycle([0, 1])
        return lambda options: OnGpu(driver, next(gpus), {"copy_threads": 2, "num_guards": 64, **options})


@pytest.fixture
def world(driver: CudaDriverStandIn) -> Iterator[World]:
    world = World(SharedMemoryTransport)
    yield world
    world.close()


@pytest.fixture
def make_node(driver: CudaDriverStandIn, world: World) -> MakeNode:
    """`(gpu)` → a node of `world` with a pool of 1 MiB on this GPU, or in main memory if None.

    Guard 3 holds 9.
    """

    def make(gpu: int | None) -> Node:
        transport = SharedMemoryTransport() if gpu is None else OnGpu(driver, gpu)
        node = world.add(transport, [transport.allocate(1 << 20)])
        transport.guards.set(HELD.index, HELD.value)
        return node

    return make


# -- what is mapped ----------------------------------------------------------------------------------


def test_segments_of_one_allocation_are_mapped_once_with_their_offsets(
    driver: CudaDriverStandIn, make_node: MakeNode, world: World
) -> None:
    """PyTorch cuts tensors out of larger allocations, and a handle always stands for a whole allocation."""
    arena = driver.allocate(8 * PAGE)
    starts = [arena.segment.address + PAGE, arena.segment.address + 5 * PAGE]
    pool = Pool([Segment(start, PAGE, "cuda") for start in starts])
    producer = world.add(SharedMemoryTransport(), [arena], pool)
    producer.fill(1)
    producer.transport.guards.set(HELD.index, HELD.value)
    consumer = make_node(0)
    link = world.link(producer, consumer)
    assert driver.held["mappings"] == 2  # one in each direction
    assert world.read(link, pairs_of((0, PAGE, PAGE), (PAGE, 0, PAGE)), HELD).error is None
    assert np.array_equal(consumer.memory()[:PAGE], producer.memory()[5 * PAGE : 6 * PAGE])
    assert np.array_equal(consumer.memory()[PAGE : 2 * PAGE], producer.memory()[PAGE : 2 * PAGE])


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no NVRTC, so that regions are copied one by one."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    cuda_copies._compiled.cache_clear()


# -- reads that go wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cuLaunchKernel", "cuEventCreate", "cuEventSynchronize"])
def test_a_failing_gpu_is_a_typed_error_and_the_next_read_succeeds(
    name: str, driver: CudaDriverStandIn, make_node: MakeNode, world: World
) -> None:
    producer, consumer = make_node(0), make_node(0)
    producer.fill(1)
    link = world.link(producer, consumer)
    driver.failures[name] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    ended = world.read(link, SCATTERED, HELD)
    assert isinstance(ended.error, TransportError)
    assert f"{name}: CUDA_ERROR_ILLEGAL_ADDRESS" in str(ended.error)
    assert world.read(link, SCATTERED, HELD).error is None
    assert np.array_equal(consumer.memory()[:100], producer.memory()[:100])


def test_copies_that_were_launched_before_a_failure_have_ended_when_it_is_reported(
    driver: CudaDriverStandIn, make_node: MakeNode, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the event the engine may reuse the blocks, so a later copy would overwrite another request's
    blocks.
    """
    without_compiler(monkeypatch)
    producer, consumer = make_node(0), make_node(0)
    link = world.link(producer, consumer)
    num_copied = []
    driver.on_copied = lambda: num_copied.append(1)
    launched = 0
    real = driver.cuMemcpyAsync

    def failing_at_the_tenth(*args: Any) -> tuple[Any, ...]:
        nonlocal launched
        launched += 1
        return (CUresult.CUDA_ERROR_INVALID_VALUE,) if launched == 10 else real(*args)

    vars(driver)["cuMemcpyAsync"] = failing_at_the_tenth
    ended = world.read(link, SCATTERED, HELD)
    assert isinstance(ended.error, TransportError)
    assert len(num_copied) == 9


@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_read_of_many_regions_is_launched_by_few_calls_and_awaited_by_one(
    has_compiler: bool,
    driver: CudaDriverStandIn,
    make_node: MakeNode,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_compiler:
        without_compiler(monkeypatch)
    # 8,192 tokens in vLLM's layout: 512 blocks, each with keys and values in 16 layers.
    num_regions, launches = (
        (16_384, {"cuLaunchKernel": 98}) if has_compiler else (500, {"cuMemcpyAsync": 500})
    )
    calls_from_python = []
    in_c = cuda_copies.copy_on_stream
    monkeypatch.setattr(
        cuda_copies, "copy_on_stream", lambda *args: calls_from_python.append(args) or in_c(*args)
    )
    producer, consumer = make_node(0), make_node(0)
    producer.fill(1)
    link = world.link(producer, consumer)
    driver.calls.clear()
    scattered = pairs_of(*((at * 64, at * 64, 32) for at in range(num_regions)))
    assert world.read(link, scattered, HELD).error is None
    about_copies = ("cuMemcpyAsync", "cuLaunchKernel", "cuEventQuery", "cuEventSynchronize")
    assert {name: driver.calls[name] for name in about_copies if driver.calls[name]} == {
        "cuEventSynchronize": 1,
        **launches,
    }
    assert len(calls_from_python) == (not has_compiler)
    pages = [node.memory().reshape(-1, 64)[:num_regions, :32] for node in (consumer, producer)]
    assert np.array_equal(*pages)


@pytest.mark.parametrize("name", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_without_a_kernel_regions_are_copied_one_by_one(
    name: str, driver: CudaDriverStandIn, make_node: MakeNode, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    producer = make_node(0)
    producer.fill(1)
    driver.failures[name] = CUresult.CUDA_ERROR_INVALID_VALUE
    link = world.link(producer, make_node(0))
    assert f"small regions are copied one by one, which is slower: {name}" in caplog.text
    assert world.read(link, SCATTERED, HELD).error is None
    assert driver.calls["cuLaunchKernel"] == 0


def test_large_regions_go_to_the_copy_engines(
    driver: CudaDriverStandIn, make_node: MakeNode, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_copies, "_SMALL_BYTES", 4096)
    producer, consumer = make_node(0), make_node(0)
    producer.fill(1)
    link = world.link(producer, consumer)
    driver.calls.clear()
    rows = [(0, 8, 100), (8192, 16384, 4096), (200, 300, 100)]
    assert world.read(link, pairs_of(*rows), HELD).error is None
    assert (driver.calls["cuMemcpyAsync"], driver.calls["cuLaunchKernel"]) == (1, 1)
    for local, remote, num_bytes in rows:
        ours, theirs = (
            node.memory()[at : at + num_bytes] for node, at in ((consumer, local), (producer, remote))
        )
        assert np.array_equal(ours, theirs)


def test_copies_have_ended_even_if_their_event_cannot_be_recorded(
    driver: CudaDriverStandIn, make_node: MakeNode, world: World
) -> None:
    link = world.link(make_node(0), make_node(0))
    num_copied = []
    driver.on_copied = lambda: num_copied.append(1)
    driver.failures["cuEventRecord"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
    assert isinstance(world.read(link, SCATTERED, HELD).error, TransportError)
    assert len(num_copied) == 64


def test_bytes_of_a_producer_that_died_meanwhile_are_not_accepted(
    driver: CudaDriverStandIn, make_node: MakeNode, world: World
) -> None:
    """The guard still holds, and the socket may not signal the loss yet, but other data may be in the memory
    by now.
    """
    with peers(cwd=ROOT) as start:
        child = start("-m", PEER, "shm", '{"on_gpu": "never"}', "serve")
        consumer = make_node(0)
        peer_id = consumer.endpoint.start_connect(said(child), timeout_s=20)
        world.serve(lambda: bool(consumer.history))

        def read() -> KVTransferError | None:
            transfer_id = consumer.endpoint.start_read(peer_id, SCATTERED, HELD, timeout_s=20)
            world.serve(lambda: bool(consumer.ends_of(transfer_id)))
            return consumer.ends_of(transfer_id)[0].error

        assert read() is None
        assert consumer.memory()[:100].tolist() == [i * 7 % 251 for i in range(100)]

        def die() -> None:
            driver.on_copied = lambda: None
            child.send_signal(signal.SIGKILL)
            child.wait()

        driver.on_copied = die
        assert isinstance(read(), PeerLostError)
        world.serve(lambda: bool(consumer.of_type(PeerLost)))


# -- peers that cannot be reached --------------------------------------------------------------------


def refusal(world: World, dialer: Node, listener: Node) -> IncompatiblePeerError:
    """Connect two incompatible nodes. Returns the error that the dialer gets."""
    dialer.endpoint.start_connect(listener.endpoint.listen(""), timeout_s=20)
    world.serve(lambda: bool(dialer.of_type(PeerLost)))
    error = dialer.of_type(PeerLost)[0].error
    assert isinstance(error, IncompatiblePeerError)
    return error


def test_gpus_without_peer_access_are_refused_when_they_connect(
    driver: CudaDriverStandIn, make_node: MakeNode, world: World
) -> None:
    driver.has_peer_access = False
    error = refusal(world, make_node(0), make_node(1))
    assert (error.field, error.local) == ("the pool's GPU", "GPU-00000000-0000-0000-0000-000000000000")
    assert "GPU-01010101" in str(error.remote)
    assert "PEER_ACCESS_UNSUPPORTED" in str(error)
    assert "nvidia-smi topo -p2p r" in str(error)


@pytest.mark.parametrize(("dialer", "listener"), [(0, None), (None, 0)])
def test_a_pool_in_main_memory_and_one_on_a_gpu_are_incompatible(
    dialer: int | None, listener: int | None, make_node: MakeNode, world: World
) -> None:
    error = refusal(world, make_node(dialer), make_node(listener))
    assert error.field == "memory of the pool"
    kinds = ("main memory", "GPU-00000000-0000-0000-0000-000000000000")
    ours, theirs = kinds if dialer is None else kinds[::-1]
    assert error.local == ours
    assert str(error.remote).startswith(f"{theirs}; a GPU and main memory can pair over auto")


def test_a_process_that_cannot_be_seen_is_refused(driver: CudaDriverStandIn) -> None:
    segment = driver.allocate(PAGE).segment
    device = CudaDevice(segment.address)
    with pytest.raises(IncompatiblePeerError, match="docker run --pid"):
        RemoteCudaMemory(Hello(1, 0, ()), [-1], 0, device)
    device.close()


# -- auto --------------------------------------------------------------------------------------------


@pytest.fixture
def auto_pair(driver: CudaDriverStandIn, world: World) -> tuple[Node, Node]:
    """Two nodes of the `auto` transport with pools on a GPU."""
    for _ in range(2):
        world.add(AutoTransport({"network": "zeromq"}), [driver.allocate(PAGE)])
    return world.nodes[0], world.nodes[1]


def test_auto_uses_shm_on_one_host(auto_pair: tuple[Node, Node], world: World) -> None:
    producer, consumer = auto_pair
    link = world.link(producer, consumer)
    assert consumer.endpoint.route_of(link.producer_id).scheme == "shm"
    producer.transport.guards.set(HELD.index, HELD.value)
    assert world.read(link, pairs_of((0, 0, PAGE)), HELD).mechanism == "cuda_ipc"


def read_staged(link: Link, world: World) -> Route:
    """Read over an `auto` link that must be staged. Returns its route."""
    link.producer.fill(1)
    link.producer.transport.guards.set(HELD.index, HELD.value)
    ended = world.read(link, pairs_of((0, 0, PAGE)), HELD)
    assert (ended.error, ended.mechanism) == (None, "tcp+staged")
    assert np.array_equal(link.consumer.memory(), link.producer.memory())
    return link.consumer.endpoint.route_of(link.producer_id)


def test_auto_stages_between_hosts(auto_pair: tuple[Node, Node], world: World) -> None:
    producer, consumer = auto_pair
    address = AutoAddress.parse(producer.endpoint.listen(""))
    link = world.link(producer, consumer, str(replace(address, host="another")))
    assert read_staged(link, world) == Route("zeromq", "on another host", sums="xxh3")


def test_auto_stages_where_two_gpus_of_a_host_have_no_peer_access(
    driver: CudaDriverStandIn, world: World
) -> None:
    driver.has_peer_access = False
    producer, consumer = (
        world.add(AutoTransport({"network": "zeromq"}), [driver.allocate(PAGE, gpu)]) for gpu in (0, 1)
    )
    route = read_staged(world.link(producer, consumer), world)
    assert route.scheme == "zeromq"
    assert "PEER_ACCESS_UNSUPPORTED" in route.reason


@pytest.mark.parametrize("refused_by", ["attribute", "cuIpcGetMemHandle"])
def test_auto_stages_memory_that_cuda_does_not_export(
    driver: CudaDriverStandIn, world: World, caplog: pytest.LogCaptureFixture, refused_by: str
) -> None:
    hidden = driver.allocate(PAGE, is_exportable=refused_by != "attribute")
    if refused_by != "attribute":
        driver.failures[refused_by] = CUresult.CUDA_ERROR_MAP_FAILED
    first = world.add(AutoTransport({"network": "zeromq"}), [hidden])
    assert "peers on this host are served over zeromq" in caplog.text
    assert "unset expandable_segments" in caplog.text
    second = world.add(AutoTransport({"network": "zeromq"}), [driver.allocate(PAGE)])
    routes = [read_staged(world.link(*nodes), world) for nodes in [(first, second), (second, first)]]
    why = "pool cannot be mapped by other processes"
    assert routes == [
        Route("zeromq", f"on this host, but its {why}", sums="xxh3"),
        Route("zeromq", f"on this host, but this {why}", sums="xxh3"),
    ]


def test_auto_stages_between_a_gpu_and_main_memory(driver: CudaDriverStandIn, world: World) -> None:
    producer = world.add(AutoTransport({"network": "zeromq"}), [driver.allocate(PAGE)])
    transport = AutoTransport({"network": "zeromq"})
    consumer = world.add(transport, [transport.allocate(PAGE)])
    link = world.link(producer, consumer)
    producer.fill(1)
    producer.transport.guards.set(HELD.index, HELD.value)
    ended = world.read(link, pairs_of((0, 0, PAGE)), HELD)
    assert (ended.error, ended.mechanism) == (None, "tcp")  # on our side nothing is staged
    assert np.array_equal(consumer.memory(), producer.memory())
    assert "main memory" in consumer.endpoint.route_of(link.producer_id).reason


# -- pools that cannot be served ---------------------------------------------------------------------


def refused(*segments: Segment) -> ConfigurationError:
    transport = SharedMemoryTransport()
    try:
        with pytest.raises(ConfigurationError) as caught:
            transport.register(Pool(segments))
        return caught.value
    finally:
        transport.close()


def test_memory_that_the_driver_does_not_export_names_pytorchs_setting(driver: CudaDriverStandIn) -> None:
    error = refused(driver.allocate(PAGE, is_exportable=False).segment)
    assert error.key == "device"
    assert "PYTORCH_CUDA_ALLOC_CONF" in str(error)


def test_a_pool_on_two_gpus_is_refused(driver: CudaDriverStandIn) -> None:
    assert "several GPUs" in str(refused(driver.allocate(PAGE, 0).segment, driver.allocate(PAGE, 1).segment))


def test_an_address_that_is_not_on_a_gpu_is_refused(driver: CudaDriverStandIn) -> None:
    assert "not on a GPU that CUDA can use" in str(refused(Segment(PAGE, PAGE, "cuda")))


def test_a_pool_must_be_in_one_kind_of_memory() -> None:
    with pytest.raises(RegionError, match="all on a GPU"):
        Pool([Segment(PAGE, PAGE), Segment(9 * PAGE, PAGE, "cuda")])


def test_a_transport_without_gpus_refuses_it_and_names_those_that_support_it() -> None:
    transport = create_transport("inproc", {})
    try:
        with pytest.raises(ConfigurationError, match="use .shm. between processes of one host") as caught:
            transport.register(Pool([Segment(PAGE, PAGE, "cuda")]))
        assert (caught.value.key, caught.value.value) == ("device", "cuda")
    finally:
        transport.close()


@pytest.mark.parametrize("lacks", ["the bindings", "the driver"])
def test_without_cuda_the_error_says_what_to_install(
    lacks: str, driver: CudaDriverStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "the bindings":
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    driver.failures["cuInit"] = CUresult.CUDA_ERROR_NOT_INITIALIZED
    transport = SharedMemoryTransport()
    with pytest.raises(BackendUnavailableError, match=r"pip install '\.\[cuda\]'"):
        transport.register(Pool([Segment(PAGE, PAGE, "cuda")]))
    transport.close()


def test_the_stand_in_has_the_same_interface_as_nvidias_bindings() -> None:
    real = pytest.importorskip("cuda.bindings.driver")
    for name in (name for name in vars(CudaDriverStandIn) if name.startswith("cu")):
        assert hasattr(real, name)
    for code in CUresult:
        assert int(getattr(real.CUresult, code.name)) == code
    for attribute in CudaDriverStandIn.CUpointer_attribute:
        assert int(getattr(real.CUpointer_attribute, attribute.name)) == attribute
    assert isinstance(real.CUipcMemHandle().getPtr(), int)
    assert len(real.CUuuid().bytes) == 16
    flags = (
        (real.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, cuda._IPC_LAZY_ENABLE_PEER_ACCESS),
        (real.CUstream_flags.CU_STREAM_NON_BLOCKING, cuda_driver.STREAM_NON_BLOCKING),
        (real.CUevent_flags.CU_EVENT_DISABLE_TIMING, cuda_driver.EVENT_DISABLE_TIMING),
        (real.CUevent_flags.CU_EVENT_BLOCKING_SYNC, cuda_driver.EVENT_BLOCKING_SYNC),
        (real.CU_MEMHOSTALLOC_PORTABLE, cuda_driver.MEMHOSTALLOC_PORTABLE),
    )
    for theirs, ours in flags:
        assert int(theirs) == ours
    for device_attribute in CudaDriverStandIn.CUdevice_attribute:
        assert int(getattr(real.CUdevice_attribute, device_attribute.name)) == device_attribute
    compiler = pytest.importorskip("cuda.bindings.nvrtc")
    for name in (name for name in vars(CudaDriverStandIn) if name.startswith("nvrtc")):
        assert hasattr(compiler, name)
