"""Which transport serves peers on other hosts."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ..base import Transport
from ..errors import BackendUnavailableError, ConfigurationError
from ..registry import create_transport

logger = logging.getLogger(__name__)

_PREFERRED, _ALWAYS_THERE = "ucx", "zeromq"


def create_network(scheme: str, options: Mapping[str, object]) -> Transport:
    """Create the transport `scheme`; with an empty one, `ucx` where it is installed and finds something, else `zeromq`.

    Raises:
        ConfigurationError: as `create_transport`; or there are options, but it is not said for which transport.
        BackendUnavailableError: the transport that was asked for cannot work here.
    """
    if scheme:
        return create_transport(scheme, options)
    if options:
        raise ConfigurationError(
            "network_options are those of one transport: set network to its name",
            key="network",
            value=scheme,
        )
    try:
        made, reason = create_transport(_PREFERRED, {}), "it is installed and works"
    except (BackendUnavailableError, ConfigurationError) as error:
        made, reason = create_transport(_ALWAYS_THERE, {}), f"{_PREFERRED} cannot be used: {error}"
    logger.info("other hosts are served by %s: %s", made.scheme, reason)
    return made
