"""A node whose pages have heads first, unlike those of `kvferry serve`. It takes the same options."""

from __future__ import annotations

import sys
from functools import partial

from kvferry.lab.engine.settings import EngineSettings
from kvferry.lab.node import cli
from kvferry.lab.node.main import main

if __name__ == "__main__":
    cli.EngineSettings = partial(EngineSettings, page_order="HND")  # type: ignore[assignment,misc]
    sys.exit(main())
