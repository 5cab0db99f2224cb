"""Copying and locating regions, moving them through sockets, and guard words: compiled if possible.

`_copy_python.py` documents the functions.
"""

from __future__ import annotations

import logging
import platform
import sys

logger = logging.getLogger(__name__)

try:
    from . import _native as _functions
except ImportError:
    from . import _copy_python as _functions  # type: ignore[no-redef]

    IS_COMPILED = False
    # Without `kvferry/__init__.py`, Python took a folder called kvferry on its path, such as a clone in the
    # current folder.
    _is_installed = getattr(sys.modules["kvferry"], "__file__", None) is not None
    logger.warning(
        "copying regions one by one in Python, at about two thirds of the speed: no compiled part next to %r; %s",
        __file__,
        "install a C compiler and reinstall kvferry"
        if _is_installed
        else "this is a folder of sources and not an installed kvferry: run `pip install .` in the clone",
    )
else:
    IS_COMPILED = True

#: Whether a guard word that another *process* stores is seen in order with the bytes around it. Plain
#: Python has no fences; x86 does not need them.
IS_ORDERED = IS_COMPILED or platform.machine() in ("x86_64", "AMD64")

# The functions themselves, so that a small copy does not pay for another Python frame.
copy_regions = _functions.copy_regions
gather_regions = _functions.gather_regions
scatter_regions = _functions.scatter_regions
read_regions_of = _functions.read_regions_of
locate_regions = _functions.locate_regions
sum_words = _functions.sum_words
sum_lengths = _functions.sum_lengths
send_pieces = _functions.send_pieces
receive_pieces = _functions.receive_pieces
busy_poll = _functions.busy_poll
load_word = _functions.load_word
store_word = _functions.store_word
copy_on_stream = _functions.copy_on_stream
signal_function = _functions.signal_function
