"""Whether PyTorch is installed, and what to do if it is not.

kvferry does not require PyTorch, because each user needs another build of it (docs/decisions/0004). Packages
that cannot be imported without it say so with this error, instead of failing somewhere below.
"""

from __future__ import annotations

from importlib.util import find_spec

from ..transports.errors import BackendUnavailableError

IS_INSTALLED = find_spec("torch") is not None


def missing(package: str) -> BackendUnavailableError:
    """Return the error to raise where `package` is imported without PyTorch."""
    return BackendUnavailableError(
        f"{package} cannot be imported: PyTorch is not installed; run `pip install '.[torch]'` in the clone of "
        "kvferry, or on a machine without a GPU `pip install torch --index-url https://download.pytorch.org/whl/cpu`"
    )
