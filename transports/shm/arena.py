"""Files in memory that two processes share: made here and sealed, or received from a peer and checked.

If a file shrinks under a mapping, the kernel kills the process that touches it (SIGBUS). So a file is sealed
before its descriptor is sent, and a received one is mapped only if it is sealed and large enough.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os

from .._memory import HUGE_PAGE_BYTES, FileMapping, Memory, advise, prefault, require_available
from ..errors import BackendUnavailableError, ConfigurationError, ProtocolError

logger = logging.getLogger(__name__)

_MADV_COLLAPSE = 25
_F_SEAL_FUTURE_WRITE = 0x10


class SharedFile:
    """An unnamed, zeroed, pre-faulted file in memory, mapped here for writing.

    Attributes:
        mapping: The whole file. The memory lives as long as this or a view of it, with or without the
            descriptor.
        descriptor: Read-only, for peers.
    """

    def __init__(self, name: str, num_bytes: int) -> None:
        """Create the file, of at least `num_bytes` bytes.

        Raises:
            ConfigurationError: `num_bytes` is not positive, or more than this machine can give.
            BackendUnavailableError: this system has no sealed files in memory.
            OSError: there is no descriptor left.
        """
        require_available(num_bytes)
        writable = _create(name)
        try:
            # A whole number of huge pages: otherwise the end of a large file would be on small ones.
            granule = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else mmap.PAGESIZE
            file_bytes = -(-num_bytes // granule) * granule
            os.ftruncate(writable, file_bytes)
            self.mapping = FileMapping(writable, file_bytes, mmap.PROT_READ | mmap.PROT_WRITE).memory
            _populate(self.mapping)
            _seal(writable)
            self.descriptor = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigurationError(
                f"cannot share {num_bytes} bytes of memory: {error}", key="num_bytes", value=num_bytes
            ) from error
        finally:
            os.close(writable)

    def close(self) -> None:
        """Close the descriptor. The mapping ends with its last view."""
        os.close(self.descriptor)


def _create(name: str) -> int:
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
            raise  # this process ran out of them; the system may well have such files
        raise BackendUnavailableError(
            f"this system has no sealed files in memory (Linux has): {error}"
        ) from error


def _populate(mapping: Memory) -> None:
    if len(mapping) < HUGE_PAGE_BYTES:
        prefault(mapping)
        return
    try:
        advise(mapping, mmap.MADV_HUGEPAGE)
    except OSError as error:
        logger.info("shared memory uses pages of the normal size: the kernel gave no huge pages: %s", error)
    prefault(mapping)
    try:
        # If the system's setting is "never", the advice above has no effect, but this still works.
        advise(mapping, _MADV_COLLAPSE)
    except OSError as error:
        logger.debug("shared memory was not collapsed into huge pages: %s", error)


def _seal(descriptor: int) -> None:
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        # Our mapping stays writable; no process can make another writable one, not even through /proc.
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError:  # a kernel before 5.1
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals | fcntl.F_SEAL_SEAL)


def map_received(descriptor: int, num_bytes: int) -> FileMapping:
    """Map a peer's file for reading. The caller still closes the descriptor.

    Args:
        num_bytes: How much is going to be read, from the start of the file.

    Raises:
        ProtocolError: the file might shrink below `num_bytes`, or it cannot be mapped.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        size = os.fstat(descriptor).st_size
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ProtocolError("the peer's shared memory is not sealed: it could shrink under us")
        if size < num_bytes:
            raise ProtocolError(f"the peer's shared memory has {size} bytes, not {num_bytes}")
        return FileMapping(descriptor, num_bytes, mmap.PROT_READ)
    except OSError as error:
        raise ProtocolError(f"the peer's shared memory cannot be mapped: {error}") from error
