"""What the demo found: one record a request, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .client import Answer
from .memcpy import memcpy_gb_per_s
from .near_tie import Comparison

MAX_PROMPT_CHARS = 24


@dataclass(frozen=True)
class RequestReport:
    """One prompt, answered by the pair and by the single node (`reference_*`). The JSON has exactly these keys.

    Attributes:
        identical: Both answered, with the same tokens.
        near_ties: Where the pair took the other one of two tokens whose logits are almost equal, and answered as the single
            node does otherwise; see `near_tie`. Empty if the answers differ in any other way.
        transport: What moved the cache; empty when nothing was moved.
        num_regions: Runs of bytes in which the cache came.
        exposed_transfer_s: The part of `transfer_s` that no computing hid.
        ttft_s: From the client's request to the first token.
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
        """Whether the pair answered as a single node may."""
        return self.identical or bool(self.near_ties)


def report_of(
    answer: Answer, reference: Answer, comparison: Comparison | None, connector: str, layout: str
) -> RequestReport:
    """Put both answers side by side; measures memcpy with as many bytes as were moved.

    Args:
        comparison: Of the two; None if one of them failed.
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
    """A table for people: a line a request, and one above it for what they have in common."""
    rows = [_HEADS, *(_cells(*item) for item in zip(prompts, answers, reports, strict=True))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    lines = ["  ".join(_aligned(cells, widths)).rstrip() for cells in rows]
    lines.insert(1, "  ".join("─" * width for width in widths))
    return "\n".join([_summary(answers, reports), "", *lines])


def write_json(path: Path, reports: Sequence[RequestReport]) -> None:
    """Write `{"requests": [...]}`."""
    content = {"requests": [dataclasses.asdict(report) for report in reports]}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


_HEADS = (
    "prompt",
    "tokens",
    "blocks",
    "regions",
    "per layer",
    "MB",
    "ms",
    "exposed",
    "GB/s",
    "memcpy",
    "TTFT ms",
    "single",
    "identical",
)


def _cells(prompt: str, answer: Answer, report: RequestReport) -> tuple[str, ...]:
    return (
        shortened(prompt, MAX_PROMPT_CHARS),
        str(report.prompt_tokens),
        str(report.num_blocks),
        str(report.num_regions),
        str(answer.transfer.get("num_regions_per_layer", 0)),
        f"{report.kv_bytes / 1e6:.1f}",
        f"{report.transfer_s * 1e3:.2f}",
        f"{report.exposed_transfer_s * 1e3:.2f}",
        f"{report.transfer_gb_per_s:.1f}",
        f"{report.memcpy_gb_per_s:.1f}",
        f"{report.ttft_s * 1e3:.0f}",
        f"{report.reference_ttft_s * 1e3:.0f}",
        "yes" if report.identical else "near-tie" if report.near_ties else "NO",
    )


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
    """`text` on one line of at most `max_chars` characters."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"
