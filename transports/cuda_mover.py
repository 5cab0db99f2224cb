"""Copies between a pool on a GPU and pinned memory; see `movers`.

Each direction has a stream, and a ring of pinned buffers. After the copies of a ticket come an event and a
host function on its stream. The host function writes to the eventfd that `fileno` returns, so no thread waits
for a copy. It is not called if the GPU fails, so an endpoint polls every few milliseconds as well while
tickets are open.

Source: the documentation of the CUDA Driver API.
"""

from __future__ import annotations

import logging
import os
import select
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import numpy as np

from .copying import signal_function
from .cuda_copies import RegionCopies
from .cuda_driver import EVENT_DISABLE_TIMING, MEMHOSTALLOC_PORTABLE, Gpu
from .errors import ConfigurationError, KVTransferError, TransportError
from .movers import MAX_WAIT_S, Mover, Ring, StagingBuffer, Ticket
from .regions import AddressArray, Int64Array, Pool

logger = logging.getLogger(__name__)


class CudaMover(Mover):
    """Copies between a pool on one GPU and two rings of pinned memory.

    Args:
        buffer_bytes: Size of one buffer: the largest slice.
        staging_bytes: Size of each ring. It is rounded down to whole buffers.

    Raises:
        ConfigurationError: a ring has no room for one buffer, or so much memory cannot be pinned.
        BackendUnavailableError: CUDA's driver or its bindings are missing, or the GPU has no stream left.
    """

    kind = "cuda"
    needs_staging = True

    def __init__(self, pool: Pool, buffer_bytes: int, staging_bytes: int) -> None:
        num_buffers = staging_bytes // buffer_bytes
        if not num_buffers:
            raise ConfigurationError(
                f"staging_bytes={staging_bytes} has no room for one slice of {buffer_bytes} bytes; raise staging_bytes "
                "or lower slice_bytes",
                key="staging_bytes",
                value=staging_bytes,
            )
        with ExitStack() as opened:  # given back last first: streams before the memory that they copy
            self._gpu = Gpu(pool.segments[0].address)
            opened.callback(self._gpu.close)
            copies = RegionCopies(self._gpu)
            opened.callback(copies.close)  # after the lanes' streams have ended, which run the kernel
            self._signal = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            opened.callback(os.close, self._signal)
            self.gather_ring, self.scatter_ring = (
                PinnedRing(self._gpu, num_buffers, buffer_bytes, opened) for _ in range(2)
            )
            self._gathers, self._scatters = (_Lane(self._gpu, copies, self._signal, opened) for _ in range(2))
            self._opened = opened.pop_all()

    def start_gather(self, buffer_address: int, sources: AddressArray, lengths: Int64Array) -> Ticket:
        return self._gathers.start(_end_to_end(buffer_address, lengths), sources, lengths)

    def start_scatter(self, targets: AddressArray, buffer_address: int, lengths: Int64Array) -> Ticket:
        return self.start_scatter_each(targets, _end_to_end(buffer_address, lengths), lengths)

    def start_scatter_each(self, targets: AddressArray, sources: AddressArray, lengths: Int64Array) -> Ticket:
        return self._scatters.start(targets, sources, lengths)

    def fileno(self) -> int:
        return self._signal

    @property
    def has_open_tickets(self) -> bool:
        return bool(self._gathers.open or self._scatters.open)

    def poll(self) -> None:
        # Before the events: what ends after this is signalled again.
        with suppress(BlockingIOError):
            os.eventfd_read(self._signal)
        self._gathers.poll()
        self._scatters.poll()

    def drain(self) -> None:
        signalled = select.poll()
        signalled.register(self._signal, select.POLLIN)
        while self.has_open_tickets:
            signalled.poll(MAX_WAIT_S * 1000)
            self.poll()

    def close(self) -> None:
        self.drain()
        self._opened.close()


class _Open(NamedTuple):
    """A ticket whose copies were launched. `failure`: what was not launched, and why."""

    ticket: Ticket
    event: Any
    failure: TransportError | None


class _Lane:
    """The stream of one direction, and the tickets on it, in the order in which they end."""

    def __init__(self, gpu: Gpu, copies: RegionCopies, signal: int, opened: ExitStack) -> None:
        self._gpu = gpu
        self._driver = gpu.driver
        self._copies = copies
        self._signal = signal
        self._stream = gpu.make_stream()
        opened.callback(gpu.release, "cuStreamDestroy", self._stream)
        # The signal of the last ticket comes after its event. It must not go to a file that reuses the
        # descriptor.
        opened.callback(gpu.release, "cuStreamSynchronize", self._stream)
        self._idle_events: list[Any] = []  # making one costs as much as launching a copy
        opened.callback(self._release_events)
        self.open: deque[_Open] = deque()

    def start(self, targets: AddressArray, sources: AddressArray, lengths: Int64Array) -> Ticket:
        ticket = Ticket()
        try:
            with self._gpu.current():
                # Before the copies: without an event nothing would say when they are over.
                event = self._idle_events.pop() if self._idle_events else self._make_event()
                self.open.append(
                    _Open(ticket, event, self._launch(event, *_merged(targets, sources, lengths)))
                )
        except TransportError as error:
            if self.open and self.open[-1].ticket is ticket:
                # Only the context could not be restored. The copies run, so the ticket ends with their event.
                self.open[-1] = self.open[-1]._replace(failure=error)
            else:
                ticket.end(error)  # nothing was launched
        return ticket

    def _make_event(self) -> Any:
        return self._driver.call("cuEventCreate", EVENT_DISABLE_TIMING)

    def _launch(self, event: Any, *regions: Any) -> TransportError | None:
        """Launch copies, and what marks their end. Returns why some of it was not launched."""
        failure: TransportError | None = None
        try:
            self._copies.launch(self._stream, *regions)
        except TransportError as error:
            failure = error  # some copies may run: the ticket ends with the event all the same
        try:
            self._driver.call("cuEventRecord", event, self._stream)
            self._driver.launch_host_function(self._stream, signal_function(), self._signal)
        except TransportError as error:
            # Without the event only the whole stream says when the copies are over.
            self._wait_for_stream()
            failure = failure or error
        return failure

    def _wait_for_stream(self) -> None:
        try:
            self._driver.call("cuStreamSynchronize", self._stream)
        except TransportError as error:  # a GPU that failed writes nothing any more
            logger.warning("the GPU failed: %s", error)

    def poll(self) -> None:
        """End the tickets whose copies are over. A stream works in order, so they are the first ones."""
        while self.open:
            ticket, event, failure = self.open[0]
            error: KVTransferError | None = failure
            try:
                if not self._driver.has_ended(event):
                    return
            except TransportError as failed:  # the GPU failed, and copies nothing any more
                error = error or failed
            self.open.popleft()
            self._idle_events.append(event)
            ticket.end(error)

    def _release_events(self) -> None:
        for event in self._idle_events:
            self._gpu.release("cuEventDestroy", event)


def _end_to_end(address: int, lengths: Int64Array) -> AddressArray:
    return (np.cumsum(lengths) - lengths).astype(np.uint64) + np.uint64(address)


def _merged(
    targets: AddressArray, sources: AddressArray, lengths: Int64Array
) -> tuple[AddressArray, AddressArray, Int64Array]:
    """Merge regions that follow each other on both sides: each copy that is launched costs microseconds."""
    if len(lengths) < 2:
        return targets, sources, lengths
    size = lengths.astype(np.uint64)
    is_first = np.ones(len(lengths), dtype=bool)
    is_first[1:] = (targets[1:] != targets[:-1] + size[:-1]) | (sources[1:] != sources[:-1] + size[:-1])
    if is_first.all():
        return targets, sources, lengths
    first = np.flatnonzero(is_first)
    return targets[first], sources[first], np.add.reduceat(lengths, first)


class PinnedRing(Ring):
    """Buffers of equal size in one allocation of pinned memory."""

    def __init__(self, gpu: Gpu, num_buffers: int, buffer_bytes: int, opened: ExitStack) -> None:
        num_bytes = num_buffers * buffer_bytes
        try:
            with gpu.current():
                base = int(gpu.driver.call("cuMemHostAlloc", num_bytes, MEMHOSTALLOC_PORTABLE))
        except TransportError as error:
            raise ConfigurationError(
                f"cannot pin {num_bytes} bytes for staging: {error}; lower staging_bytes, or raise the limit on locked "
                "memory (`ulimit -l`)",
                key="staging_bytes",
                value=num_bytes,
            ) from error
        opened.callback(gpu.release, "cuMemFreeHost", base)
        self.buffer_bytes = buffer_bytes
        self.num_buffers = num_buffers
        self._free = [
            StagingBuffer(base + at * buffer_bytes, buffer_bytes, None) for at in range(num_buffers)
        ]
        self._waiters: dict[object, Callable[[], None]] = {}  # in the order in which they came

    @property
    def num_free(self) -> int:
        """Buffers that no one has taken."""
        return len(self._free)

    def take(self, num_bytes: int) -> StagingBuffer | None:
        if num_bytes > self.buffer_bytes:
            raise ConfigurationError(
                f"a slice of {num_bytes} bytes does not fit into a staging buffer of {self.buffer_bytes} bytes",
                key="staging_bytes",
                value=num_bytes,
            )
        return self._free.pop() if self._free else None

    def give_back(self, buffer: StagingBuffer) -> None:
        self._free.append(buffer)
        # One by one, because a waiter may take the buffer, and then the next one goes on waiting.
        while self._free and self._waiters:
            waiter = next(iter(self._waiters))
            self._waiters.pop(waiter)()

    def when_free(self, waiter: object, call: Callable[[], None]) -> None:
        self._waiters.setdefault(waiter, call)

    def forget(self, waiter: object) -> None:
        self._waiters.pop(waiter, None)

    def is_awaited(self, besides: object) -> bool:
        return any(waiter is not besides for waiter in self._waiters)
