"""Reading a page of metrics in Prometheus' text format, with nothing but the standard library."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from .errors import CommandError

#: More than any page of ours has.
MAX_BYTES: Final = 16 << 20

_SAMPLE: Final = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL: Final = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
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
        pairs = {key: re.sub(r"\\.", _unescaped, quoted) for key, quoted in _LABEL.findall(labels or "")}
        yield name, Sample(pairs, value)


def _unescaped(match: re.Match[str]) -> str:
    return _ESCAPES.get(match.group(), match.group())


def fetch(url: str, timeout_s: float) -> str:
    """Return the text at a URL.

    Raises:
        CommandError: there is none within the time, or it is too long. The message does not name the URL.
    """
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            data: bytes = response.read(MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read(2000).decode(errors="replace").strip()
        raise CommandError(f"HTTP status {error.code}: {text or error.reason}") from error
    except (OSError, ValueError) as error:
        raise CommandError(str(getattr(error, "reason", error))) from error
    if len(data) > MAX_BYTES:
        raise CommandError(f"the answer is longer than {MAX_BYTES} bytes")
    return data.decode(errors="replace")
