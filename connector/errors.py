"""Errors about requests and their leases: a branch of the tree in `transports/errors.py`.

KVTransferError
├─ ConnectorError                            a handoff failed
│  ├─ InvalidTransferParamsError(ValueError) a request's kv_transfer_params are malformed: key, value
│  ├─ StaleLeaseError                        the offer is over: released, expired, or from another epoch
│  ├─ ContentMismatchError                   the offer is for another prompt, adapter, salt or image
│  └─ RendezvousError                        the two requests of a rendezvous did not meet
└─ WorkerHookError                           hooks of a worker half raised in a step: output
"""

from __future__ import annotations

from ..transports.errors import KVTransferError
from .output import KVConnectorOutput


class ConnectorError(KVTransferError):
    """A handoff failed."""


class InvalidTransferParamsError(ConnectorError, ValueError):
    """A request's `kv_transfer_params` are malformed. The request was refused; nothing was claimed.

    Attributes:
        key: The parameter that is wrong, e.g. `"remote_lease"`.
        value: What it was, shortened.
    """

    def __init__(self, message: str, *, key: str, value: object) -> None:
        super().__init__(message)
        self.key = key
        self.value = value


class StaleLeaseError(ConnectorError):
    """The offer is over (released, expired, aborted, or of another epoch). No byte was accepted."""


class ContentMismatchError(ConnectorError):
    """The offered blocks were not computed from this request's prompt. No byte was read.

    Attributes:
        num_tokens: Tokens of the offer that were compared.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__(
            f"the offer of {num_tokens} tokens was not computed from this request's prompt: token ids, LoRA adapter, "
            "cache salt or images differ; do both nodes use the same tokenizer and chat template, and did the router "
            "send the prompt that was prefilled?"
        )
        self.num_tokens = num_tokens


class RendezvousError(ConnectorError):
    """The prefill request and the decode request of a rendezvous did not meet.

    Nothing was offered or read.
    """


class WorkerHookError(KVTransferError):
    """Hooks of a worker half raised in a step.

    All hooks of the step were called, and the metadata is cleared.

    What the step computed is not valid, except if only `get_finished`, `get_kv_connector_stats`, `failure` or
    `warning` raised. The tracebacks were logged.

    Attributes:
        output: The step's report; `hook_errors` says which hooks raised what.
    """

    def __init__(self, output: KVConnectorOutput) -> None:
        super().__init__("; ".join(output.hook_errors.values()))
        self.output = output
