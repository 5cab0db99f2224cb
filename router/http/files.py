"""Files that a user names: their content is read within bounds."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

#: No file of options, keys or prompts is longer.
MAX_BYTES: Final = 16 << 20


def text_of(path: str | Path, max_bytes: int = MAX_BYTES, errors: str = "strict") -> str:
    """Return the text of a file.

    It is read at once and only so far, because a device such as `/dev/zero` has no end.

    Args:
        errors: What to do with bytes that are not UTF-8, as for `bytes.decode`.

    Raises:
        OSError: the file cannot be read, or has more bytes; `strerror` says which.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes} bytes", os.fspath(path))
    return content.decode(errors=errors)
