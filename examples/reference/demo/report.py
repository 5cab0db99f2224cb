"""Show what the demo found: one record per request, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .client import Answer
from .memcpy import memcpy_gb_per_s
from .near_tie import Comparison

MAX_PROMPT_CHARS = 24


@dataclass(frozen=True)
class RequestReport:
    """Compare the pair's answer to one prompt with the single node's (`reference_*`). The JSON has exactly these keys.

    Attributes:
        identical: Both nodes answered, with the same tokens.
        near_ties: Where the pair chose the other one of two tokens whose logits are almost equal, if everything else is
            as the single node says; see `near_tie`. Empty if the answers differ in any other way.
        transport: Scheme of the transport that moved the cache; empty if nothing was moved.
        num_regions: Contiguous runs of bytes in which the cache came.
        exposed_transfer_s: The part of `transfer_s` that computing the prompt did not hide.
        ttft_s: Time from the client's request to the first token.
    """

    prompt_tokens: int
    text: str
    token_ids: list[int]
    reference_token_ids: list[int]
    identical: bool
    near_ties: list[dict[str, Any]]
    connector: str
    transport: str
    layout: str
    num_blocks: int
    num_regions: int
    kv_bytes: int
    transfer_s: float
    exposed_transfer_s: float
    transfer_gb_per_s: float
    memcpy_gb_per_s: float
    ttft_s: float
    reference_ttft_s: float

    @property
    def is_right(self) -> bool:
        """Say whether the pair gave an answer that a single node may give."""
        return self.identical or bool(self.near_ties)


def report_of(
    answer: Answer, reference: Answer, comparison: Comparison | None, connector: str, layout: str
) -> RequestReport:
    """Compare both answers, and measure memcpy with as many bytes as were moved.

    Args:
        comparison: Of the two answers; None if one of the nodes failed.
    """
    transfer = answer.transfer
    kv_bytes = transfer.get("num_bytes", 0)
    transfer_s = transfer.get("seconds", 0.0)
    return RequestReport(
        prompt_tokens=answer.prompt_tokens,
        text=answer.text,
        token_ids=answer.token_ids,
        reference_token_ids=reference.token_ids,
        identical=comparison is not None and comparison.is_identical,
        near_ties=_near_ties(comparison),
        connector=connector,
        transport=transfer.get("transport", ""),
        layout=transfer.get("layout", "") or layout,
        num_blocks=transfer.get("num_blocks", 0),
        num_regions=transfer.get("num_regions", 0),
        kv_bytes=kv_bytes,
        transfer_s=transfer_s,
        exposed_transfer_s=transfer.get("exposed_seconds", 0.0),
        transfer_gb_per_s=kv_bytes / transfer_s / 1e9 if transfer_s > 0 else 0.0,
        memcpy_gb_per_s=memcpy_gb_per_s(kv_bytes) if kv_bytes > 0 else 0.0,
        ttft_s=answer.ttft_s,
        reference_ttft_s=reference.ttft_s,
    )


def _near_ties(comparison: Comparison | None) -> list[dict[str, Any]]:
    is_right = comparison is not None and comparison.mismatch is None
    return [dataclasses.asdict(tie) for tie in comparison.near_ties] if comparison and is_right else []


def format_table(prompts: Sequence[str], answers: Sequence[Answer], reports: Sequence[RequestReport]) -> str:
    """Format a table for people: one line per request, after a line with what all requests have in common."""
    requests = zip(prompts, answers, reports, strict=True)
    rows = [tuple(_COLUMNS), *(tuple(show(*request) for show in _COLUMNS.values()) for request in requests)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(_aligned(cells, widths)).rstrip() for cells in rows]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join([_summary(answers, reports), "", *lines])


def write_json(path: Path, reports: Sequence[RequestReport]) -> None:
    """Write `{"requests": [...]}`."""
    content = {"requests": [dataclasses.asdict(report) for report in reports]}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _verdict(report: RequestReport) -> str:
    return "yes" if report.identical else "near-tie" if report.near_ties else "NO"


#: Columns of the table: heading → what it shows of a request.
_COLUMNS: Mapping[str, Callable[[str, Answer, RequestReport], str]] = {
    "prompt": lambda prompt, answer, report: shortened(prompt, MAX_PROMPT_CHARS),
    "tokens": lambda prompt, answer, report: str(report.prompt_tokens),
    "blocks": lambda prompt, answer, report: str(report.num_blocks),
    "regions": lambda prompt, answer, report: str(report.num_regions),
    "per layer": lambda prompt, answer, report: str(answer.transfer.get("num_regions_per_layer", 0)),
    "MB": lambda prompt, answer, report: f"{report.kv_bytes / 1e6:.1f}",
    "ms": lambda prompt, answer, report: f"{report.transfer_s * 1e3:.2f}",
    "exposed": lambda prompt, answer, report: f"{report.exposed_transfer_s * 1e3:.2f}",
    "GB/s": lambda prompt, answer, report: f"{report.transfer_gb_per_s:.1f}",
    "memcpy": lambda prompt, answer, report: f"{report.memcpy_gb_per_s:.1f}",
    "TTFT ms": lambda prompt, answer, report: f"{report.ttft_s * 1e3:.0f}",
    "single": lambda prompt, answer, report: f"{report.reference_ttft_s * 1e3:.0f}",
    "identical": lambda prompt, answer, report: _verdict(report),
}


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cells[0].ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)),
    ]


def _summary(answers: Sequence[Answer], reports: Sequence[RequestReport]) -> str:
    def united(values: Sequence[str]) -> str:
        return ", ".join(sorted({value for value in values if value})) or "none"

    def way(report: RequestReport, answer: Answer) -> str:
        reason = answer.transfer.get("reason", "")
        return f"{report.transport} ({reason})" if reason else report.transport

    transports = united([way(*pair) for pair in zip(reports, answers, strict=True)])
    mechanisms = united([answer.transfer.get("mechanism", "") for answer in answers])
    layouts = united([report.layout for report in reports])
    return f"transport {transports} · mechanism {mechanisms} · layout {layouts}"


def shortened(text: str, max_chars: int) -> str:
    """Return `text` on one line of at most `max_chars` characters."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"
