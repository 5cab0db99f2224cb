"""The choice of the transport that serves peers on other hosts."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ..base import Transport
from ..errors import BackendUnavailableError, ConfigurationError
from ..registry import create_transport

logger = logging.getLogger(__name__)

_PREFERRED, _ALWAYS_THERE = "ucx", "zeromq"


def create_network(scheme: str, options: Mapping[str, object]) -> Transport:
    """Create the transport `scheme`. If it is empty: `ucx` if that is installed and works here, otherwise `zeromq`.

    Raises:
        ConfigurationError: as `create_transport` raises it, or there are options but no scheme.
        BackendUnavailableError: the transport `scheme` cannot work here.
    """
    if scheme:
        return create_transport(scheme, options)
    if options:
        raise ConfigurationError(
            "network_options need the transport that they are for: set network to its name",
            key="network",
            value=scheme,
        )
    try:
        made, reason = create_transport(_PREFERRED, {}), "it is installed and works"
    except (BackendUnavailableError, ConfigurationError) as error:
        made, reason = create_transport(_ALWAYS_THERE, {}), f"{_PREFERRED} cannot be used: {error}"
    logger.info("other hosts are served by %s: %s", made.scheme, reason)
    return made
