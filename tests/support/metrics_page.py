"""Read a page of `/metrics`: what it declares, and what promtool says about it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import commonprefix

from prometheus_client.parser import text_string_to_metric_families

from .prometheus import program


@dataclass(frozen=True)
class Declared:
    """A metric as a page declares it.

    Attributes:
        labels: Names, sorted. A metric without samples shows none.
    """

    kind: str
    text: str
    labels: tuple[str, ...]


def declared(page: str, *, without: tuple[str, ...] = ()) -> dict[str, Declared]:
    """Return kvferry's metrics on a page by name.

    Args:
        without: Labels to leave out: those that a host puts on all its metrics.
    """
    found = {}
    for family in text_string_to_metric_families(page):
        # The client library adds a gauge of this name to each counter and histogram.
        if family.name.startswith("kvferry_") and not family.name.endswith("_created"):
            labels = {label for sample in family.samples for label in sample.labels}
            name = f"{family.name}_total" if family.type == "counter" else family.name
            text = Declared(family.type, family.documentation, tuple(sorted(labels - {"le", *without})))
            found[name] = text
    return found


def assert_promtool_is_content(page: str) -> None:
    """Run `promtool check metrics` on kvferry's part of a page; skip the test if there is no promtool."""
    promtool = program("promtool")
    ours = [
        line
        for line in page.splitlines()
        if line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith("kvferry_")
    ]
    assert ours
    checked = subprocess.run(
        [promtool, "check", "metrics"],
        input="\n".join(ours) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def with_rows(document: str, metrics: Mapping[str, Declared]) -> str:
    """Return a document whose tables have a row for each of these metrics, and for no other metric of
    kvferry.

    A metric that is new comes after the one whose name has the longest beginning in common with its own.
    """
    lines: list[str] = []
    names: list[str] = []  # of the metric in each line, or empty
    for line in document.splitlines():
        found = re.match(r"\| `(kvferry_\w*[a-z])` \|.*\|$", line)
        if found is None or found[1] in metrics:
            lines.append(row(found[1], metrics[found[1]]) if found else line)
            names.append(found[1] if found else "")
    for name in sorted(metrics.keys() - set(names)):
        nearest = max(range(len(names)), key=lambda at: (len(commonprefix([names[at], name])), at))
        lines.insert(nearest + 1, row(name, metrics[name]))
        names.insert(nearest + 1, name)
    return "\n".join([*lines, ""])


def row(name: str, metric: Declared) -> str:
    """Return the row of a metric in a document."""
    return f"| `{name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.text} |".replace("|  |", "| |")
