"""The host's libnl, which must not mix with the copy in NIXL's wheel."""

from __future__ import annotations

import ctypes
import functools

#: What the host's `libibverbs` is linked with.
_LIBNL_ROUTE = "libnl-route-3.so.200"


@functools.cache
def keep_libnl_apart() -> None:
    """Load the host's libnl, if there is one, before the UCX of NIXL's wheel does.

    That UCX is linked with copies of libibverbs and libnl in the wheel. Its module for EFA also needs
    `libefa.so.1`, which is the host's, and with it come the host's libibverbs and libnl. The loader resolves
    their symbols in the order in which it finds libraries, and the wheel's come first. So the host's libnl
    registers its tables with the wheel's, which refuses them because it has the same ones. At the exit of the
    process the host's libnl takes them out of lists in which they never were: a segmentation fault.

    A library that was loaded on its own resolves its symbols in itself first, also when another library needs
    it later. libibverbs and libefa are not loaded here: they must go on to use the wheel's, whose objects UCX
    passes to them.
    """
    try:
        ctypes.CDLL(_LIBNL_ROUTE)
    except OSError:
        pass  # without it there is no libibverbs of the host either
