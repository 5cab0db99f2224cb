"""Show the demo's results: one record per request, as a table and as JSON."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..client import Answer
from ..load import aligned
from .near_tie import Comparison

MAX_PROMPT_CHARS = 24


class Way(enum.Enum):
    """How the router sends a request through the pair.

    `DEFAULT` is what the router does without options: a prompt of several chunks crosses while it is
    computed. `IN_TURN` asks one node after the other.
    """

    DEFAULT = "default"
    IN_TURN = "in turn"

    @property
    def router_arguments(self) -> tuple[str, ...]:
        """Options of a router that goes this way."""
        return () if self is Way.DEFAULT else ("--rendezvous", "off")


#: What `report_of` returns: a record of the demo's JSON.
Report = Mapping[str, Any]


def report_of(
    answer: Answer,
    reference: Answer,
    comparison: Comparison | None,
    connector: str,
    layout: str,
    way: Way = Way.IN_TURN,
) -> Report:
    """Compare the pair's answer to one prompt with the single node's (`reference_*`).

    Figures of a transfer are 0, and `transport` is empty, if nothing was moved or the connector reported no
    figures. `exposed_transfer_s` is the part of `transfer_s` that computing the prompt did not hide, and
    `num_regions` the contiguous runs of bytes in which the cache came. `near_ties` is 0 if the answers differ
    in any other way as well; see `near_tie`.

    Args:
        comparison: Of the two answers; None if one of the nodes failed.
        layout: Layout of the decode node's cache, for a record of no transfer.
    """
    transfer = answer.transfer
    kv_bytes = transfer.get("num_bytes", 0)
    transfer_s = transfer.get("seconds", 0.0)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "reference_token_ids": reference.token_ids,
        "identical": comparison is not None and comparison.is_identical,
        "near_ties": len(comparison.near_ties) if comparison and comparison.mismatch is None else 0,
        "connector": connector,
        "way": way.value,
        "loaded_tokens": answer.loaded_tokens,
        "transport": transfer.get("transport", ""),
        "layout": transfer.get("layout", "") or layout,
        "num_blocks": transfer.get("num_blocks", 0),
        "num_regions": transfer.get("num_regions", 0),
        "kv_bytes": kv_bytes,
        "transfer_s": transfer_s,
        "exposed_transfer_s": transfer.get("exposed_seconds", 0.0),
        "transfer_gb_per_s": kv_bytes / transfer_s / 1e9 if transfer_s > 0 else 0.0,
        "ttft_s": answer.ttft_s,
        "reference_ttft_s": reference.ttft_s,
    }


def is_right(report: Report) -> bool:
    """Say whether the pair gave an answer that a single node may give."""
    return bool(report["identical"] or report["near_ties"])


def format_table(prompts: Sequence[str], answers: Sequence[Answer], reports: Sequence[Report]) -> str:
    """Format a table: one line per request, between what all requests have in common and what the columns
    mean.
    """
    rows = [_HEADINGS, *map(_row, prompts, answers, reports)]
    return "\n".join([_summary(answers, reports), "", *aligned(rows), "", _MEANING])


def explain_slower(reports: Sequence[Report]) -> str:
    """Say why the pair was slower than the single node, by the default way if it was asked; empty if it was
    not.
    """
    shown = [report for report in reports if report["way"] == Way.DEFAULT.value] or reports
    both = [(report["ttft_s"], report["reference_ttft_s"]) for report in shown if is_right(report)]
    pair_s, single_s = (sum(times) for times in zip(*both, strict=True)) if both else (0.0, 0.0)
    if pair_s <= single_s or single_s == 0:
        return ""
    return (
        f"The pair's first tokens came {(pair_s - single_s) / len(both) * 1e3:.0f} ms later than the single node's on "
        f"average ({pair_s / single_s - 1:.0%}).\nThis is expected on an idle machine: a request passes through the router "
        "and two nodes, and each of\nthem runs a step. A pair pays off when a node would otherwise interrupt its answers "
        "for the prompts\nof others."
    )


def write_json(path: Path, reports: Sequence[Report]) -> None:
    """Write `{"requests": [...]}`."""
    content = {"requests": list(reports)}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


_HEADINGS = ("prompt", "tokens", "way", "transfer", "TTFT ms", "single", "identical")
_MEANING = """\
transfer  what the decode node read, and how long it waited for that after the prompt had been computed
single    time to first token of the single node, which transfers nothing"""


def _row(prompt: str, answer: Answer, report: Report) -> tuple[str, ...]:
    return (
        shortened(prompt, MAX_PROMPT_CHARS),
        str(report["prompt_tokens"]),
        report["way"],
        _transfer(answer, report),
        f"{report['ttft_s'] * 1e3:.0f}",
        f"{report['reference_ttft_s'] * 1e3:.0f}",
        "yes" if report["identical"] else "near-tie" if report["near_ties"] else "NO",
    )


def _transfer(answer: Answer, report: Report) -> str:
    if answer.error:
        return "request failed"
    if answer.transfer_error:
        return "failed"
    if not answer.transfer:
        # Some connectors report no figures of what they load.
        return f"{answer.loaded_tokens} tokens" if answer.loaded_tokens else "none"
    counts = ((report["num_blocks"], "block"), (report["num_regions"], "region"))
    counted = [
        f"{number} {what}{'s' * (number != 1)}" for number, what in counts if number
    ]  # a store may not count
    return ", ".join(
        [*counted, f"{report['kv_bytes'] / 1e6:.1f} MB", f"{report['exposed_transfer_s'] * 1e3:.2f} ms"]
    )


def _summary(answers: Sequence[Answer], reports: Sequence[Report]) -> str:
    def united(values: Iterable[str]) -> str:
        return ", ".join(sorted({value for value in values if value})) or "none"

    def transport(answer: Answer) -> str:
        name, reason = answer.transfer.get("transport", ""), answer.transfer.get("reason", "")
        return f"{name} ({reason})" if reason else name

    transports = united(map(transport, answers))
    mechanisms = united(answer.transfer.get("mechanism", "") for answer in answers)
    layouts = united(report["layout"] for report in reports)
    return f"transport {transports} · mechanism {mechanisms} · layout {layouts}"


def shortened(text: str, max_chars: int) -> str:
    """Return `text` on one line of at most `max_chars` characters."""
    line = " ".join(text.split())
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"
