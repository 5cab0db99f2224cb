"""Reading a page of metrics in Prometheus' text format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

_SAMPLE: Final = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL: Final = re.compile(r'[ \t]*([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"[ \t]*,?')
_ESCAPES: Final = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True)
class Sample:
    """One line of a page."""

    labels: Mapping[str, str]
    value: float


class MetricsPage:
    """The samples of one page."""

    def __init__(self, text: str) -> None:
        """Read a page. Lines that are no samples are ignored."""
        self._samples: dict[str, list[Sample]] = {}
        for name, sample in _samples_of(text):
            self._samples.setdefault(name, []).append(sample)

    def samples(self, name: str) -> list[Sample]:
        """Return all samples of a name, in the order of the page."""
        return self._samples.get(name, [])

    def total(self, name: str) -> float | None:
        """Return the sum of a name's samples over all labels; None if the page has none."""
        found = self.samples(name)
        return sum(sample.value for sample in found) if found else None


def _samples_of(text: str) -> Iterator[tuple[str, Sample]]:
    for line in text.splitlines():
        match = None if line.startswith("#") else _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, number = match.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        yield name, Sample(dict(_labels_of(labels or "")), value)


def _labels_of(text: str) -> Iterator[tuple[str, str]]:
    # One label after the other: a search for the next one would take quadratic time where there is none.
    at = 0
    while match := _LABEL.match(text, at):
        yield match[1], re.sub(r"\\.", _unescaped, match[2])
        at = match.end()


def _unescaped(match: re.Match[str]) -> str:
    return _ESCAPES.get(match.group(), match.group())
