"""A real Chromium without a window, for tests of the router's page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

#: Where `make tools` puts Debian's packages.
BUILT = Path(__file__).parents[2] / "build" / "chromium"
PROGRAM = "usr/lib/chromium/chromium-headless-shell"
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
#: `no-sandbox`: Chromium refuses to run as root with it, and tests in a container often run as root. The only
#: page that it opens is ours. `no-proxy-server`: nothing but the router can be reached.
OPTIONS = ("--no-sandbox", "--no-proxy-server", "--disable-gpu", "--disable-dev-shm-usage")


def find_chromium() -> str:
    """Return the path of a Chromium, or skip the test with the reason."""
    for package in ("playwright", "axe_playwright_python"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed: run `make venv`")
    built = BUILT / PROGRAM
    program = str(built) if built.is_file() else next(filter(None, map(shutil.which, NAMES)), "")
    if not program:
        pytest.skip("no Chromium: run `make tools`")
    return program


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium inside the block. No other event loop may run in this thread meanwhile."""
    program = find_chromium()
    from playwright.sync_api import sync_playwright

    libraries = [str(path) for path in BUILT.glob("usr/lib/*-linux-gnu*")]
    libraries += [str(path / "pulseaudio") for path in map(Path, libraries)]
    path = os.pathsep.join(filter(None, [*libraries, os.environ.get("LD_LIBRARY_PATH", "")]))
    environment: dict[str, str | float | bool] = {**os.environ, "LD_LIBRARY_PATH": path}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(OPTIONS), env=environment)
        yield browser
        browser.close()
