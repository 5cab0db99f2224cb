"""Register the connector with NVIDIA Dynamo, if that is installed.

Dynamo's worker around vLLM looks the connector's name up in a table. The row says what a request for a
prefill asks for, and what of its answer the decode worker gets. A name that is not in the table is refused.
Our `kv_transfer_params` have the shape of NixlConnector's, so we take its row.
"""

from __future__ import annotations

import importlib
import logging

logger = logging.getLogger(__name__)

TABLE_MODULE = "dynamo.vllm.kv_connector_protocols"
#: The version whose table the tests use.
TRIED_VERSION = "1.6.1"


def register_with_dynamo(connector: str) -> None:
    """Add the connector to Dynamo's table, and do nothing if Dynamo is not installed. Idempotent.

    Raises nothing, because vLLM must start also with a Dynamo that has no such table. Then it logs one
    warning.
    """
    try:
        table = importlib.import_module(TABLE_MODULE)
        table.KV_CONNECTOR_PROTOCOLS.setdefault(connector, table.NixlConnectorProtocol)
    except ModuleNotFoundError as error:
        if error.name not in ("dynamo", "dynamo.vllm"):
            _warn(connector, error)
    except Exception as error:  # noqa: BLE001 - whatever the import of another project's module raises
        _warn(connector, error)


def _warn(connector: str, error: Exception) -> None:
    logger.warning(
        "cannot register %s with Dynamo: %s: %s; if its prefill workers refuse the connector, install ai-dynamo %s",
        connector,
        type(error).__name__,
        error,
        TRIED_VERSION,
    )
