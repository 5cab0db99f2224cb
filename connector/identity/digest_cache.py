"""Digests of large files, kept between starts."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

logger = logging.getLogger(__name__)

#: Increase the number when files are hashed in another way.
_DIGESTS = "digests-1"
_LOCK_WAIT_S = 900.0
_LOCK_POLL_S = 0.1
_DIGEST = re.compile(r"[0-9a-f]{64}")


def cache_folder() -> Path:
    """Return where kvferry keeps what it need not compute twice: `$KVFERRY_CACHE`, or `~/.cache/kvferry`.

    Raises:
        RuntimeError: `KVFERRY_CACHE` is not set, and the user has no home folder.
    """
    return Path(os.environ.get("KVFERRY_CACHE") or Path.home() / ".cache" / "kvferry")


@dataclass(frozen=True)
class DigestCache:
    """Keeps digests of files between starts.

    The name of an entry contains device, inode, size, and the times of the last change of contents and of the
    inode in ns. So a file that was replaced, or changed in place, has another entry, even if its modification
    time was set back. If the cache cannot be read or written, that costs time and nothing else.

    Attributes:
        folder: Where the entries are; None keeps nothing.
        min_bytes: Smaller files are hashed each time.
        settle_s: A file that changed less than this many seconds ago is not cached, because a coarse clock
            might give the next change the same time.
    """

    folder: Path | None
    min_bytes: int = 8 << 20
    settle_s: float = 2.0

    @classmethod
    def default(cls) -> Self:
        """Open the cache in `cache_folder`."""
        try:
            return cls(cache_folder() / _DIGESTS)
        except RuntimeError:  # no home folder, as for an arbitrary user id in a container
            return cls(None)

    def get(self, found: os.stat_result) -> str | None:
        """Return the digest of a file, or None if it is not known or the entry is damaged."""
        if self.folder is None or found.st_size < self.min_bytes:
            return None
        try:
            digest = (self.folder / entry_name(found)).read_text(errors="replace")
        except OSError:
            return None
        return digest if _DIGEST.fullmatch(digest) else None

    def put(self, found: os.stat_result, digest: str) -> None:
        """Keep the digest of a file."""
        changed = max(found.st_mtime, found.st_ctime)
        if self.folder is None or found.st_size < self.min_bytes or time.time() - changed < self.settle_s:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder)
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(digest)
                # A rename is atomic: a reader sees the whole entry or none, even if another process writes it
                # as well.
                os.replace(name, self.folder / entry_name(found))
            except OSError:
                os.unlink(name)
                raise
        except OSError as error:
            logger.debug("cannot keep a weight file's digest in %s: %s", self.folder, error)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Let one process at a time hash the files of this name, if the file system has locks.

        The ranks of a node start together. Without the lock each of them would read all weights from the
        disk.
        """
        try:
            if self.folder is None:
                raise FileNotFoundError("no cache folder")
            self.folder.mkdir(parents=True, exist_ok=True)
            file = (self.folder / f"{name[:2]}.lock").open("w")
        except OSError:
            yield
            return
        with file:
            deadline = time.monotonic() + _LOCK_WAIT_S
            while not _try_lock(file.fileno()) and time.monotonic() < deadline:
                time.sleep(_LOCK_POLL_S)
            yield


def entry_name(found: os.stat_result) -> str:
    """Return the name of the entry for a file in its present state."""
    numbers = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    return "-".join(f"{number:x}" for number in numbers)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks: hash at the same time as others
    return True
