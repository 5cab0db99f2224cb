"""The reviewers' page names every folder of the package, and says how large it is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "for-reviewers.md").read_text()
ROWS = re.findall(r"^\| `([\w/*.]+)` \| ([\d,]+) \|", PAGE, re.MULTILINE)


def num_lines(pattern: str) -> int:
    """Lines of Python and C in a folder, or in the files that a pattern names."""
    paths = [path for end in ("py", "c") for path in (ROOT / pattern).rglob(f"*.{end}")]
    if pattern.endswith("*.py"):
        paths = [*ROOT.glob(pattern), *ROOT.glob(pattern.removesuffix("py") + "c")]
    return sum(path.read_bytes().count(b"\n") for path in paths)


def test_each_size_is_right_within_a_tenth() -> None:
    assert len(ROWS) > 15
    wrong = {
        name: (said, num_lines(name))
        for name, said in ROWS
        if abs(num_lines(name) - int(said.replace(",", ""))) > max(50, num_lines(name) / 10)
    }
    assert not wrong


def test_every_package_is_named() -> None:
    named = {name.split("/")[0] for name, _ in ROWS}
    packages = {path.name for path in (ROOT / "src" / "kvferry").iterdir() if path.is_dir()}
    assert packages - named == set()
