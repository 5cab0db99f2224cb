"""vLLM's style of a connector: one class that implements the methods of both halves itself.

In this library a connector is two halves. A class in vLLM's style derives from `KVConnectorBase` as well, but
makes no halves. It works all the same: its instances hold a half that has only the defaults, for the methods
that the class leaves out.
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

from ..transports.errors import ConfigurationError


def half_of_defaults(half: ABCMeta, connector: type, inherited: type) -> Any:
    """Return a half with the defaults, for a connector whose class implements everything else itself.

    Args:
        half: `SchedulerHalf` or `WorkerHalf`.
        connector: The class, derived from `KVConnectorBase`.
        inherited: `KVConnectorBase`: what the class has from there, it does not implement.

    Raises:
        ConfigurationError: the class lacks methods of this half that have no default.
    """
    required = sorted(half.__abstractmethods__)
    missing = [name for name in required if getattr(connector, name) is getattr(inherited, name)]
    if missing:
        make = "make_scheduler_half" if half.__name__ == "SchedulerHalf" else "make_worker_half"
        raise ConfigurationError(
            f"{connector.__qualname__} does not implement {', '.join(missing)}; implement them or override {make}",
            key="kv_connector",
            value=connector.__qualname__,
        )
    # Calls reach the class's own methods first, so these run only if one of them calls `super()`.
    return type(f"Default{half.__name__}", (half,), dict.fromkeys(required, _no_default))()


def _no_default(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError
