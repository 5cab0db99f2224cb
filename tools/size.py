"""Print how many lines each part of the project has, and fail if one has more than its limit.

    python tools/size.py

Limits only fall. A commit that has to raise one says why. `make check` runs this.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
#: Name of a part, the folders or files in it, what counts there, and how many lines it may have.
PARTS: Final = (
    ("library", ("transports", "connector", "runner_mixin", "src"), ".py", 43_270),
    ("router", ("router",), ".py", 15_650),
    ("lab", ("lab", "cli", "examples", "tools", "docs"), ".py", 24_180),
    ("tests", ("tests",), ".py", 74_100),
    ("documents", ("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"), ".md", 9_600),
)


def lines_of(paths: tuple[str, ...], ending: str) -> int:
    """Return how many lines the files below these paths have that git knows and that end so."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *paths], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = {ROOT / name for name in listed.stdout.split("\0") if name.endswith(ending)}
    return sum(
        len(path.read_bytes().splitlines()) for path in files if path.is_file() and not path.is_symlink()
    )


def main() -> int:
    is_over = False
    for name, paths, ending, limit in PARTS:
        lines = lines_of(paths, ending)
        remark = (
            f"  {lines - limit:,} too many: remove some, or raise the limit in tools/size.py and say why"
            if lines > limit
            else ""
        )
        is_over |= lines > limit
        print(f"{name:>10} {lines:>7,} of {limit:>7,} lines{remark}")
    return int(is_over)


if __name__ == "__main__":
    sys.exit(main())
