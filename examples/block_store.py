"""A store of blocks in a folder that nodes share: asynchronous, with prefix reuse and eviction.

    python examples/disagg_pair.py --connector BlockStoreConnector --connector-module block_store \\
        --connector-option folder=/dev/shm/blocks --connector-option capacity_gb=2

A file holds one block of all layers. Its name is a digest of everything that the block's bytes depend on, so
prompts that begin alike share files. A request loads the longest run of blocks that the store holds beyond
those that the node has. A folder in /dev/shm is memory that the processes of one host share; nodes on several
hosts can share a network folder.

The scheduler half decides which blocks are loaded and saved. The worker half gives this work to two threads,
while the engine computes other requests. It reports a request when its thread is done with the blocks, and no
earlier.
"""

import contextlib
import itertools
import logging
import os
import queue
import threading
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch

import kvferry.connector as kv
from kvferry.transports.errors import ConfigurationError

logger = logging.getLogger(__name__)

Request = kv.ConnectorRequest
Tables = Sequence[Sequence[int]]
#: Files of consecutive blocks of a prompt, and the node's blocks for them.
Copies = list[tuple[Path, int]]

#: In `kv_transfer_params`: the last file of the prompt that the prefill node is just saving.
SAVING = "block_store_saving"
#: Seconds that a request waits for it. After that, the node computes the rest of the prompt itself.
WAIT_S = 2.0
#: Requests whose blocks are kept until they are saved. If there are more, a prompt is not saved: a store that
#: cannot keep up must not take the pool from the requests that need it.
MAX_SAVES = 8
#: Seconds that a node waits at its end for threads that hang in the file system.
SHUTDOWN_S = 5.0
#: Of the names of files. Eviction deletes no others, whatever else is in the folder.
SUFFIX = ".kvblock"
#: Bytes of the checksum at the end of a file.
CHECKSUM_BYTES = 4


@dataclass(frozen=True)
class Orders(kv.KVConnectorMetadata):
    """One step's work, by request."""

    loads: dict[str, Copies] = field(default_factory=dict)
    saves: dict[str, Copies] = field(default_factory=dict)


class BlockStoreScheduler(kv.SchedulerHalf):
    """Decides which blocks are loaded and which are saved."""

    def __init__(self, folder: Path, max_blocks: int, config: kv.EngineConfig, spec: kv.KVCacheSpec) -> None:
        self._folder, self._max_blocks = folder, max_blocks
        self._config, self._spec = config, spec
        self._orders = Orders()
        self._paths: dict[str, list[Path]] = {}
        self._deadlines: dict[str, float] = {}
        self._to_load: dict[str, slice] = {}
        self._saving: set[str] = set()

    def on_new_request(self, request: Request) -> None:
        # Hash a prompt once: the engine asks in each step while the request waits.
        digests = kv.block_digests(request, self._config, self._spec)
        # The blocks that do not fit into the store together would only push each other out.
        paths = [self._folder / f"{digest}{SUFFIX}" for digest in digests[: self._max_blocks]]
        self._paths[request.request_id] = paths
        # Only for exactly this prompt: if it were another, its blocks would never come.
        if paths and (request.kv_transfer_params or {}).get(SAVING) == paths[-1].name:
            self._deadlines[request.request_id] = time.monotonic() + WAIT_S

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        size, request_id = self._spec.block_size, request.request_id
        # The last token is always computed here, for its logits. So its block need not be loaded.
        num_useful = (request.num_prompt_tokens - 1) // size
        first = num_computed_tokens // size
        wanted = self._paths[request_id][first:num_useful]
        num_found = sum(1 for _ in itertools.takewhile(Path.exists, wanted))
        if num_found < len(wanted) and time.monotonic() < self._deadlines.get(request_id, 0.0):
            return None, False  # the engine asks again in the next step
        # The call with the blocks does not repeat how many of them the node had. The engine acts on our
        # latest answer, so this is the one to remember; to overwrite it changes no answer.
        self._to_load[request_id] = slice(first, first + num_found)
        return num_found * size, num_found > 0

    def update_state_after_alloc(self, request: Request, block_ids: Tables, num_external_tokens: int) -> None:
        # It is called a second time after the load, with 0 tokens.
        if num_external_tokens:
            blocks = self._to_load[request.request_id]
            paths = self._paths[request.request_id][blocks]
            self._orders.loads[request.request_id] = list(zip(paths, block_ids[0][blocks], strict=True))

    def build_connector_meta(self, scheduler_output: kv.SchedulerOutput) -> Orders:
        orders, self._orders = self._orders, Orders()
        return orders

    def update_connector_output(self, connector_output: kv.KVConnectorOutput) -> None:
        self._saving -= connector_output.finished_sending

    def request_finished(self, request: Request, block_ids: Tables) -> tuple[bool, dict[str, Any] | None]:
        paths = self._paths.pop(request.request_id)
        self._deadlines.pop(request.request_id, None)
        self._to_load.pop(request.request_id, None)
        # A request that was aborted may still be loading: only what was computed to its end is known to be
        # right.
        is_computed = request.finish_reason in ("stop", "length")
        if not is_computed or not paths or len(self._saving) >= MAX_SAVES:
            return False, None
        self._saving.add(request.request_id)
        self._orders.saves[request.request_id] = list(zip(paths, block_ids[0], strict=False))
        # The engine keeps the blocks until `get_finished` names the request. The params go to the decode
        # node.
        return True, {SAVING: paths[-1].name}


@dataclass
class Job:
    """What a thread does for one request.

    It belongs to the thread until the thread has put it into the queue of ended jobs.

    Attributes:
        ordered_s: When it was ordered, from `time.monotonic()`.
        seconds: How long the thread worked on it.
        error: Why it failed; otherwise empty.
    """

    kind: Literal["load", "save"]
    request_id: str
    copies: Copies
    ordered_s: float
    seconds: float = 0.0
    error: str = ""


class BlockStoreWorker(kv.WorkerHalf):
    """Has threads copy blocks between the caches and files: one loads, and one saves, so that no load waits
    for a save.

    A thread takes jobs from its queue, and puts those that it has ended into another. Nothing else is shared,
    so nothing needs a lock.
    """

    def __init__(self, folder: Path, capacity_bytes: int, pool: kv.KVCacheConfig) -> None:
        self._folder, self._capacity_bytes, self._pool = folder, capacity_bytes, pool
        self._caches: list[torch.Tensor] = []
        self._block_bytes = 0
        # Bounded by the scheduler half: MAX_SAVES saves, and one load for each request that holds blocks.
        self._jobs: dict[str, queue.SimpleQueue[Job | None]] = {
            "load": queue.SimpleQueue(),
            "save": queue.SimpleQueue(),
        }
        self._ended: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._failed_blocks: set[int] = set()
        self._load_errors: dict[str, str] = {}
        self._stats = kv.StatsCollector()
        self._warning = ""

    # -- the engine's thread

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        # A layer that shares another's cache appears in `kv_caches` as well, but not in the group. Axis 0 may
        # count an attention kernel's blocks, several of which make one block.
        names, num_blocks = self._pool.kv_cache_groups[0].layer_names, self._pool.num_blocks
        caches = [kv_caches[name] for name in names]
        self._caches = [cache.view(num_blocks, -1, *cache.shape[1:]) for cache in caches]
        self._block_bytes = sum(cache[0].nbytes for cache in self._caches)
        self._folder.mkdir(parents=True, exist_ok=True)
        for kind, jobs in self._jobs.items():
            # A daemon: a file system that hangs must not keep the process from ending.
            thread = threading.Thread(target=self._run, args=(jobs,), name=f"block-store-{kind}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        orders, now = cast(Orders, self.connector_metadata), time.monotonic()
        for request_id, copies in orders.loads.items():
            self._jobs["load"].put(Job("load", request_id, copies, now))
        for request_id, copies in orders.saves.items():
            self._jobs["save"].put(Job("save", request_id, copies, now))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        # Only what a thread has ended is reported, also of a request that was aborted meanwhile: until then
        # the thread may write into its blocks or read them, so the engine must not give them to another
        # request.
        ended = [self._ended.get_nowait() for _ in range(self._ended.qsize())]
        loads = [job for job in ended if job.kind == "load"]
        for job in loads:
            self._note_load(job)
        return {job.request_id for job in ended if job.kind == "save"}, {job.request_id for job in loads}

    def _note_load(self, job: Job) -> None:
        if job.error:
            self._failed_blocks.update(block for _, block in job.copies)
            self._load_errors[job.request_id] = job.error
        self._stats.add(
            kv.TransferRecord(
                job.request_id,
                transport="file",
                mechanism="read",
                layout="per-layer",
                num_blocks=len(job.copies),
                num_bytes=len(job.copies) * self._block_bytes,
                seconds=job.seconds,
                exposed_seconds=time.monotonic() - job.ordered_s,  # the request waited all this time
                error=job.error,
            )
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_load_errors(self) -> dict[str, str]:
        errors, self._load_errors = self._load_errors, {}
        return errors

    def get_kv_connector_stats(self) -> kv.KVConnectorStats | None:
        return self._stats.take()

    @property
    def warning(self) -> str:
        return self._warning

    def shutdown(self) -> None:
        self._is_closing.set()
        for jobs in self._jobs.values():
            jobs.put(None)  # wakes a thread that has nothing to do
        deadline = time.monotonic() + SHUTDOWN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                logger.warning("%s hangs in %s; the node ends without it", thread.name, self._folder)
        self._threads = []

    # -- the threads

    def _run(self, jobs: queue.SimpleQueue[Job | None]) -> None:
        # Jobs that are left when the node ends are dropped: the engine gives the pool back, and no request
        # waits any more.
        while (job := jobs.get()) is not None and not self._is_closing.is_set():
            started = time.monotonic()
            try:
                copy = self._load if job.kind == "load" else self._save
                copy(job.copies)
            except Exception as failure:  # noqa: BLE001 - if the thread ended, no job would ever be reported again
                what = f"{type(failure).__name__} {failure}"
                job.error = f"cannot {job.kind} {len(job.copies)} blocks in {self._folder}: {what}"
                logger.warning("request %s: %s", job.request_id, job.error)
            if job.kind == "save":
                self._warning = job.error
            job.seconds = time.monotonic() - started
            self._ended.put(job)

    def _load(self, copies: Copies) -> None:
        for path, block in copies:
            self._require_open()
            data = bytearray(path.read_bytes())
            # The name says what a file should hold. Its length and checksum show whether it does.
            if (
                len(data) != self._block_bytes + CHECKSUM_BYTES
                or checksum(data[:-CHECKSUM_BYTES]) != data[-CHECKSUM_BYTES:]
            ):
                path.unlink(missing_ok=True)  # so that the block is saved again
                raise ValueError(f"{path.name} is damaged")
            start = 0
            for cache in self._caches:
                page = cache[block]
                saved = torch.frombuffer(data, dtype=torch.uint8, count=page.nbytes, offset=start)
                page.copy_(saved.view(page.dtype).view(page.shape))
                start += page.nbytes
        if self._caches[0].is_cuda:
            torch.cuda.synchronize()  # a model that computes on another stream would not wait for these copies
        touch(copies)

    def _save(self, copies: Copies) -> None:
        touch(copies)  # what is here already must not be evicted for the rest
        missing = [(path, block) for path, block in copies if not path.exists()]
        if missing:
            self._make_room(len(missing) * (self._block_bytes + CHECKSUM_BYTES))
        for path, block in missing:
            self._require_open()
            # In logical order, so that the file also suits a node that keeps heads and tokens in another
            # order.
            pages = [cache[block].contiguous().flatten().view(torch.uint8) for cache in self._caches]
            data = torch.cat(pages).cpu().numpy().tobytes()
            # The rename makes a file appear only when it is complete. Nodes that save the same block write
            # the same bytes.
            unfinished = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
            try:
                unfinished.write_bytes(data + checksum(data))
                unfinished.rename(path)
            finally:
                unfinished.unlink(missing_ok=True)
        touch(copies)

    def _make_room(self, num_bytes: int) -> None:
        """Delete the files that were not used for the longest time, until `num_bytes` more fit."""
        files = []
        for path in self._folder.glob(f"*{SUFFIX}*"):  # also what a node that crashed left unfinished
            with contextlib.suppress(FileNotFoundError):  # another node deletes files, too
                stat = path.stat()
                files.append((stat.st_mtime_ns, stat.st_size, path))
        excess = sum(size for _, size, _ in files) + num_bytes - self._capacity_bytes
        for _, size, path in sorted(files):
            if excess <= 0:
                return
            # A node that is just reading the file goes on; one that has not opened it yet computes the block
            # instead.
            path.unlink(missing_ok=True)
            excess -= size

    def _require_open(self) -> None:
        if self._is_closing.is_set():
            raise InterruptedError("the node is shutting down")


def touch(copies: Copies) -> None:
    """Note that files were used: the first block last, because the others are of no use without it."""
    for path, _ in reversed(copies):
        now = time.time_ns()  # the file system's own clock may be too coarse to tell them apart
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, ns=(now, now))


def checksum(data: bytes | bytearray) -> bytes:
    """Return the checksum of a block's bytes."""
    return zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little")


class BlockStoreConnector(kv.KVConnectorBase):
    """Keeps the blocks of finished prompts in a folder, and loads those with which a prompt begins.

    Options:
        folder: Where the files are.
        capacity_gb: Size in GB (10⁹ bytes) above which the files that were not used for the longest time are
            deleted; default 1.
    """

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        _options(options)  # so that a wrong option is reported before the model is loaded

    def make_scheduler_half(self) -> BlockStoreScheduler:
        folder, capacity_bytes = _options(self.kv_transfer_config.kv_connector_extra_config)
        spec = self._spec()
        num_layers = len(self.kv_cache_config.kv_cache_groups[0].layer_names)
        max_blocks = capacity_bytes // (spec.page_size_bytes * num_layers + CHECKSUM_BYTES)
        return BlockStoreScheduler(folder, max_blocks, self.config, spec)

    def make_worker_half(self) -> BlockStoreWorker:
        self._spec()
        return BlockStoreWorker(
            *_options(self.kv_transfer_config.kv_connector_extra_config), self.kv_cache_config
        )

    def _spec(self) -> kv.KVCacheSpec:
        specs = [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]
        # At the end of an answer, a sliding window has freed blocks of the prompt and a recurrent state is
        # past it.
        is_full = [type(spec) for spec in specs] == [kv.FullAttentionSpec]
        if not is_full or self.config.parallel.world_size != 1:
            raise ConfigurationError(
                "BlockStoreConnector supports only one group of full attention on one rank; use another connector"
            )
        return specs[0]


def _options(options: Mapping[str, Any]) -> tuple[Path, int]:
    """Return the folder and its capacity in bytes."""
    unknown = sorted(options.keys() - {"folder", "capacity_gb"})
    if unknown or not options.get("folder"):
        raise ConfigurationError(
            f"BlockStoreConnector needs the option folder and may have capacity_gb; it was given {dict(options)}",
            key=unknown[0] if unknown else "folder",
        )
    capacity_gb = options.get("capacity_gb", 1)
    if not isinstance(capacity_gb, int | float) or not capacity_gb > 0:
        raise ConfigurationError(
            f"capacity_gb must be a positive number of GB, got {capacity_gb!r}", key="capacity_gb"
        )
    return Path(str(options["folder"])), int(capacity_gb * 1e9)
