"""Show the demo's results: one record per request, as a table and as JSON."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .client import Answer
from .memcpy import memcpy_gb_per_s
from .near_tie import Comparison

MAX_PROMPT_CHARS = 24
#: Stands for the figures of a load that the connector did not report.
NO_FIGURES = "no figures reported"
#: Stands for a figure that the connector left out, as a store does that has nothing to say about regions.
NOT_COUNTED = "-"


class Way(enum.Enum):
    """How the router sends a request through the pair.

    `DEFAULT` is what the router does without options: a prompt of several chunks crosses while it is computed. `IN_TURN` asks one
    node after the other.
    """

    DEFAULT = "default"
    IN_TURN = "in turn"

    @property
    def router_arguments(self) -> tuple[str, ...]:
        """Options of a router that goes this way."""
        return () if self is Way.DEFAULT else ("--rendezvous", "off")


@dataclass(frozen=True)
class RequestReport:
    """Compare the pair's answer to one prompt with the single node's (`reference_*`). The JSON has exactly these keys.

    Attributes:
        identical: Both nodes answered, with the same tokens.
        near_ties: Where the pair chose the other one of two tokens whose logits are almost equal, if everything else is
            as the single node says; see `near_tie`. Empty if the answers differ in any other way.
        way: How the router sent the request; see `Way`.
        loaded_tokens: Prompt tokens whose cache was moved.
        transport: What the cache came through, e.g. the scheme of a transport; empty if nothing was moved, or if the
            connector reported no figures. The other figures are 0 in both cases.
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
    way: str
    loaded_tokens: int
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
    answer: Answer,
    reference: Answer,
    comparison: Comparison | None,
    connector: str,
    layout: str,
    way: Way = Way.IN_TURN,
) -> RequestReport:
    """Compare both answers, and measure memcpy with as many bytes as were moved.

    Args:
        comparison: Of the two answers; None if one of the nodes failed.
        layout: Layout of the decode node's cache, for a record of no transfer.
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
        way=way.value,
        loaded_tokens=answer.loaded_tokens,
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
    """Format a table: one line per request, after a line with what all requests have in common."""
    requests = list(zip(prompts, answers, reports, strict=True))
    rows = [[column.show(*request) for column in _COLUMNS] for request in requests]
    headings = [column.heading for column in _COLUMNS]
    widths = [max(map(len, cells)) for cells in zip(headings, *rows, strict=True)]
    lines = [_line(headings, widths), "  ".join("─" * width for width in widths)]
    for (_, answer, _), cells in zip(requests, rows, strict=True):
        lines.append(_line(cells, widths, "" if answer.transfer else _instead(answer)))
    return "\n".join([_summary(answers, reports), "", *lines])


def format_legend() -> str:
    """Explain the table's columns, one line each."""
    width = max(len(column.heading) for column in _COLUMNS)
    return "\n".join(
        f"  {column.heading.ljust(width)}  {column.meaning}" for column in _COLUMNS if column.meaning
    )


def explain_nothing(answers: Sequence[Answer], reports: Sequence[RequestReport]) -> str:
    """Say why there was nothing to transfer; empty if that is true of no request."""
    idle = [report for answer, report in zip(answers, reports, strict=True) if _had_nothing(answer)]
    if not idle:
        return ""
    reason = "the decode node had their blocks in its prefix cache already"
    if all(report.prompt_tokens == 1 for report in idle):
        reason = "the decode node always computes the last token itself, and these prompts have only one"
    return f"Nothing to transfer for {len(idle)} of {len(reports)} requests: {reason}."


def explain_slower(reports: Sequence[RequestReport]) -> str:
    """Say why the pair was slower than the single node, by the default way if it was asked; empty if it was not."""
    shown = [report for report in reports if report.way == Way.DEFAULT.value] or reports
    both = [(report.ttft_s, report.reference_ttft_s) for report in shown if report.is_right]
    pair_s, single_s = (sum(times) for times in zip(*both, strict=True)) if both else (0.0, 0.0)
    if pair_s <= single_s or single_s == 0:
        return ""
    return (
        f"The pair's first tokens came {(pair_s - single_s) / len(both) * 1e3:.0f} ms later than the single node's on "
        f"average ({pair_s / single_s - 1:.0%}).\nThis is expected on an idle machine: a request passes through the router "
        "and two nodes, and each of\nthem runs a step. A pair pays off when a node would otherwise interrupt its answers "
        "for the prompts\nof others."
    )


def write_json(path: Path, reports: Sequence[RequestReport]) -> None:
    """Write `{"requests": [...]}`."""
    content = {"requests": [dataclasses.asdict(report) for report in reports]}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _verdict(report: RequestReport) -> str:
    return "yes" if report.identical else "near-tie" if report.near_ties else "NO"


@dataclass(frozen=True)
class _Column:
    """Describe one column of the table.

    Attributes:
        meaning: Its line of the legend; empty if the heading says enough.
        is_transfer: Whether it is about the transfer, and so has no value without one.
    """

    heading: str
    show: Callable[[str, Answer, RequestReport], str]
    meaning: str = ""
    is_transfer: bool = False


_COLUMNS = (
    _Column("prompt", lambda prompt, answer, report: shortened(prompt, MAX_PROMPT_CHARS)),
    _Column("tokens", lambda prompt, answer, report: str(report.prompt_tokens), "length of the prompt"),
    _Column(
        "way",
        lambda prompt, answer, report: report.way,
        "in turn: one node after the other; default: of a prompt of several chunks each is transferred while the next one is computed",
    ),
    _Column(
        "blocks",
        lambda prompt, answer, report: str(report.num_blocks),
        "blocks of the KV cache that the decode node loaded",
        is_transfer=True,
    ),
    _Column(
        "regions",
        lambda prompt, answer, report: str(report.num_regions or NOT_COUNTED),
        "contiguous runs of bytes that were read",
        is_transfer=True,
    ),
    _Column(
        "per layer",
        lambda prompt, answer, report: str(answer.transfer.get("num_regions_per_layer") or NOT_COUNTED),
        "regions that the same blocks need if the cache is stored per layer",
        is_transfer=True,
    ),
    _Column(
        "MB", lambda prompt, answer, report: f"{report.kv_bytes / 1e6:.1f}", "bytes read", is_transfer=True
    ),
    _Column(
        "ms",
        lambda prompt, answer, report: f"{report.transfer_s * 1e3:.2f}",
        "time from the start of the first read to the end of the last; by the default way also the computing in between",
        is_transfer=True,
    ),
    _Column(
        "exposed",
        lambda prompt, answer, report: f"{report.exposed_transfer_s * 1e3:.2f}",
        "ms that the decode node, and with it the first token, waited for the cache after the prompt had been computed",
        is_transfer=True,
    ),
    _Column(
        "GB/s",
        lambda prompt, answer, report: f"{report.transfer_gb_per_s:.1f}",
        "MB divided by ms",
        is_transfer=True,
    ),
    _Column(
        "memcpy",
        lambda prompt, answer, report: f"{report.memcpy_gb_per_s:.1f}",
        "GB/s of one memcpy of as many bytes on this machine",
        is_transfer=True,
    ),
    _Column(
        "TTFT ms",
        lambda prompt, answer, report: f"{report.ttft_s * 1e3:.0f}",
        "time to the first token, from the client's request to the pair",
    ),
    _Column(
        "single",
        lambda prompt, answer, report: f"{report.reference_ttft_s * 1e3:.0f}",
        "the same in ms for the single node, which transfers nothing",
    ),
    _Column(
        "identical",
        lambda prompt, answer, report: _verdict(report),
        "whether pair and single node answered with the same tokens; near-tie: they chose between two equally likely ones",
    ),
)


def _line(cells: Sequence[str], widths: Sequence[int], instead: str = "") -> str:
    """Format a line of the table.

    Args:
        instead: A text for the place of all columns about the transfer; empty to show the columns.
    """
    aligned = [cells[0].ljust(widths[0])]
    aligned += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
    if instead:
        about = [index for index, column in enumerate(_COLUMNS) if column.is_transfer]
        place = slice(about[0], about[-1] + 1)
        aligned[place] = [instead.center(len("  ".join(aligned[place])))]
    return "  ".join(aligned).rstrip()


def _had_nothing(answer: Answer) -> bool:
    """Say whether the decode node needed no block of another node."""
    cached = int(answer.metrics.get("num_cached_tokens", 0))
    is_loaded = bool(answer.transfer) or answer.loaded_tokens > 0
    is_answered = bool(answer.token_ids) and not is_loaded and not answer.transfer_error
    return is_answered and cached >= answer.prompt_tokens - 1


def _instead(answer: Answer) -> str:
    if answer.error:
        return "request failed"
    if answer.transfer_error:
        return "transfer failed"
    if answer.loaded_tokens:
        return f"{answer.loaded_tokens} tokens, {NO_FIGURES}"
    return "nothing to transfer" if _had_nothing(answer) else "not transferred"


def _summary(answers: Sequence[Answer], reports: Sequence[RequestReport]) -> str:
    def united(values: Sequence[str]) -> str:
        return ", ".join(sorted({value for value in values if value})) or "none"

    def transport(answer: Answer) -> str:
        name, reason = answer.transfer.get("transport", ""), answer.transfer.get("reason", "")
        return f"{name} ({reason})" if reason else name

    def of_load(answer: Answer, name: str) -> str:
        return name or (NO_FIGURES if answer.loaded_tokens else "")

    transports = united([of_load(answer, transport(answer)) for answer in answers])
    mechanisms = united([of_load(answer, answer.transfer.get("mechanism", "")) for answer in answers])
    layouts = united([report.layout for report in reports])
    return f"transport {transports} · mechanism {mechanisms} · layout {layouts}"


def shortened(text: str, max_chars: int) -> str:
    """Return `text` on one line of at most `max_chars` characters."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"
