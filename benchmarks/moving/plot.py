"""Plot the results as bars in an SVG image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from .results import Result

_LABEL_PX, _BAR_PX, _VALUE_PX = 210, 420, 60
_ROW_PX, _HEAD_PX, _MARGIN_PX = 20, 44, 16
_OURS, _OTHERS = "#1f6feb", "#8b949e"


def svg(results: Sequence[Result]) -> str:
    """Return one group of bars per shape: each contender's speed as a multiple of memcpy's, which a line marks."""
    body: list[str] = []
    y = _MARGIN_PX
    scale = _BAR_PX / max([1.0, *(result.to_memcpy for result in results)])
    for (model, num_blocks, layout), group in groupby(
        results, key=lambda r: (r.model, r.num_blocks, r.layout)
    ):
        rows = list(group)
        title = f"{model}, {num_blocks} x {rows[0].num_bytes // num_blocks >> 10:,} KiB, {layout}"
        body += _group(title, rows, y, scale)
        y += _HEAD_PX + _ROW_PX * len(rows)
    width = _LABEL_PX + _BAR_PX + _VALUE_PX + 2 * _MARGIN_PX
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{y}" fill="white"/>',
            *body,
            "</svg>\n",
        ]
    )


def _group(title: str, rows: Sequence[Result], top: int, scale: float) -> Iterator[str]:
    left = _MARGIN_PX + _LABEL_PX
    yield f'<text x="{_MARGIN_PX}" y="{top + 14}" font-weight="bold">{escape(title)} (x memcpy)</text>'
    first = top + 24
    for index, row in enumerate(rows):
        y = first + index * _ROW_PX
        colour = _OURS if row.contender.startswith("kvferry") else _OTHERS
        width = row.to_memcpy * scale
        yield f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(row.contender)}</text>'
        yield f'<rect x="{left}" y="{y + 2}" width="{width:.1f}" height="{_ROW_PX - 5}" fill="{colour}"/>'
        yield f'<text x="{left + width + 5:.1f}" y="{y + 13}">{row.to_memcpy:.2f}</text>'
    bottom = first + len(rows) * _ROW_PX
    at = f"{left + scale:.1f}"
    yield f'<line x1="{at}" y1="{first}" x2="{at}" y2="{bottom}" stroke="black" stroke-dasharray="3 3"/>'
