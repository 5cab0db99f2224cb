"""A receipt: how an answer's cache came, for a client that asks. A function of the request's spans.

Reference nodes report what they loaded in their answer. A server of vLLM reports it to whoever asks for the
request's spans, which the router does only for a receipt.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from ..answer.exchange import Exchange
from .explain import Told
from .records import CallMarks, RequestRecord, View

#: Which answers have a receipt: those of clients that have a key and send the header below, those of all
#: clients that send it, or all.
Receipts = Literal["keyed", "asked", "always"]
#: Asks for a receipt.
RECEIPT_HEADER: Final = "X-KV-Receipt"

#: The facts that say why a prompt was computed where its answer is, or that an answer has moved.
_MOVES: Final = ("answer moved", "answer stopped")


def receipt_of(exchange: Exchange, record: RequestRecord, told: Told | None = None) -> dict[str, Any]:
    """Return how the cache of one prompt came. What is not known is null.

    Args:
        told: What the decode node says of the request, if it is a server of vLLM.
    """
    view = View(record)
    figures = view.figures
    said = _said_by_vllm(told) if told is not None and not figures.is_split else _said_in_answer(figures)
    num_prompt, loaded, cached = (said.get(f"{name}_tokens") for name in ("prompt", "loaded", "cached"))
    error, is_read = str(said.get("error") or ""), bool(said.get("transport") and said.get("bytes"))
    return {
        "request_id": record.request_id,
        "way": exchange.source,
        "prefill": view.prefill_node or None,
        "decode": view.decode_node or None,
        "moves": sum(event["name"] in _MOVES for event in record.span.events),
        "transport": said.get("transport") or None,
        "mechanism": said.get("mechanism") or None,
        "bytes": said.get("bytes") or 0,
        "ms": _ms(said.get("seconds", 0.0)) if is_read else None,
        "exposed_ms": _ms(said.get("exposed_seconds", 0.0)) if is_read else None,
        # The owner's guard is looked at after each read, whatever moves the bytes.
        "checked": [*filter(None, ("guard", said.get("sums")))] if is_read and not error else [],
        "prompt_tokens": num_prompt,
        "cached_tokens": exchange.bill.cached_tokens,
        "loaded_tokens": loaded,
        "computed_tokens": _rest(num_prompt, loaded, cached),
        "why_not_loaded": "" if loaded and not error else _why(exchange, record, error, cached, told),
    }


def _rest(num_prompt: int | None, loaded: int | None, cached: int | None) -> int | None:
    """Return how many tokens of the prompt the decode node computed."""
    if num_prompt is None or loaded is None or cached is None:
        return None
    return max(num_prompt - loaded - cached, 0)


def _said_in_answer(figures: CallMarks) -> dict[str, Any]:
    """Return what a reference node's answer says; without figures nothing."""
    if not figures.is_split:
        return {}
    return {
        "transport": figures.transport,
        "mechanism": figures.mechanism,
        "bytes": figures.num_bytes,
        "seconds": figures.transfer_s,
        "exposed_seconds": figures.exposed_s,
        "sums": figures.sums,
        "error": figures.transfer_error,
        "prompt_tokens": figures.num_prompt_tokens,
        "cached_tokens": figures.num_cached_tokens,
        "loaded_tokens": figures.num_loaded_tokens,
    }


def _said_by_vllm(told: Told) -> dict[str, Any]:
    """Return what our connector in a server of vLLM says of a load and of its tokens."""
    said: dict[str, Any] = {}
    for span in told.spans:
        if span.name in ("load_wait", "generate"):
            said |= {**span.attributes, "error": span.error or said.get("error", "")}
    numbers = ("bytes", "seconds", "exposed_seconds", "prompt_tokens", "cached_tokens", "loaded_tokens")
    # The words in place of numbers of a node that is not what it seems are left out.
    return {key: value for key, value in said.items() if (key not in numbers) == isinstance(value, str)}


def _why(exchange: Exchange, record: RequestRecord, error: str, cached: int | None, told: Told | None) -> str:
    """Say in words why the answer's node has loaded nothing, or not what was offered."""
    if error:
        return f"the load failed: {error}"
    if exchange.is_alone:
        reasons = [str(event.get("reason", "")) for event in record.span.events if event["name"] == "alone"]
        return (reasons or [str(record.span.attributes.get("placement", ""))])[-1]
    if exchange.offer is None:
        return "the prefill node offered no cache"
    if told is not None and told.error:
        return f"the decode node does not say what it loaded: {told.error}"
    return "the decode node had the prompt in its own cache" if cached else "the decode node does not say"


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
