"""Fail on each sentence of the documents that has more than 30 words: `make docs` runs it.

Code is one word, however long it is. A cell of a table, an item of a list and a heading end a sentence.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST = 30

#: What begins a block of its own: an item of a list, a heading or a quotation.
BLOCK = re.compile(r"^\s*(?:[*+-]|\d+\.|#+|>) ")
#: Where a sentence ends: before a capital letter, code, a link or emphasis.
END = re.compile(r'(?<=[.!?:;])[*_)]*\s+(?=[A-Z0-9"*_(\[!]|vLLM|kvferry)')


def pages() -> list[Path]:
    """Return the documents that people write. `docs/reference` is written from the code."""
    names = ("README.md", "CONTRIBUTING.md", "docs/*.md", "docs/decisions/*.md")
    return [path for name in names for path in sorted(ROOT.glob(name))]


def blocks(text: str) -> Iterator[str]:
    """Yield paragraphs, items and cells, each in one line, without their code and the targets of links."""
    text = re.sub(r"^( *)```.*?^\1```$|<!--.*?-->", "\n\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]*`", "Code", text)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    block = ""
    for line in [*text.splitlines(), ""]:
        if not line.strip() or line.startswith("|") or BLOCK.match(line):
            yield block
            block = ""
        if line.startswith("|"):
            yield from line.strip("|").split("|")
        else:
            block += " " + BLOCK.sub("", line).strip()
    yield block


def too_long(text: str) -> list[str]:
    """Return the sentences of a document that have too many words."""
    sentences = (" ".join(part.split()) for block in blocks(text) for part in END.split(block))
    return [part for part in sentences if len(re.findall(r"\S*\w\S*", part)) > LONGEST]


if __name__ == "__main__":
    found = [(path.relative_to(ROOT), part) for path in pages() for part in too_long(path.read_text())]
    for path, part in found:
        print(f"{path}: more than {LONGEST} words: {part}", file=sys.stderr)
    sys.exit(1 if found else 0)
