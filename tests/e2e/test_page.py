"""The router's page in a real browser, with a real router, real nodes and real requests."""

from __future__ import annotations

import http.server
import json
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from kvferry.cli.main import main
from kvferry.reference.demo.launcher import LaunchedProcess, Launcher, Spawn
from tests.e2e.conftest import START_TIMEOUT_S
from tests.support.browser import chromium, find_chromium
from tests.support.client import Client

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"
KEY = "s3cret-ferry"
#: Longer than the interval of the page's questions, and short enough for a test.
WAIT_MS = 20_000


class HostileNode(http.server.BaseHTTPRequestHandler):
    """A node whose health report is markup."""

    def do_GET(self) -> None:
        body = json.dumps({"status": "failing", "error": HOSTILE}).encode()
        self.send_response(503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        return


@contextmanager
def hostile_node() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), HostileNode) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@dataclass(frozen=True)
class Fleet:
    """One prefill node, one decode node that can be killed, a second one whose text is hostile, and their routers.

    Attributes:
        guarded: A router that asks for `KEY`.
    """

    prefill: LaunchedProcess
    decode: LaunchedProcess
    router: Client
    guarded: LaunchedProcess


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def fleet(spawn: Spawn, tiny_single_arguments: tuple[str, ...]) -> Iterator[Fleet]:
    find_chromium()
    with hostile_node() as url, Launcher(spawn) as launcher:
        prefill, decode = (
            launcher.start_node(role, role, *tiny_single_arguments, "--connector", "shm", "--dev")
            for role in ("prefill", "decode")
        )
        launcher.wait_listening([prefill, decode], START_TIMEOUT_S)
        router = launcher.start_router("router", [prefill], [decode], "--decode", url, "--dev")
        guarded = launcher.start_router("guarded router", [prefill], [decode], "--api-key", KEY)
        launcher.wait_ready([prefill, decode, router, guarded], START_TIMEOUT_S)
        yield Fleet(prefill, decode, Client(router), guarded)


class Watched:
    """A page whose console and requests are recorded."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.page: Page = context.new_page()
        self.complaints: list[str] = []
        self.urls: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.goto(f"{url}/")
        self.page.locator("#content").wait_for(timeout=WAIT_MS)


@contextmanager
def watching(browser: Browser, fleet: Fleet, **options: Any) -> Iterator[Watched]:
    """Open the page. Afterwards nothing may have been logged, and nothing asked elsewhere."""
    url = fleet.router.process.url
    with browser.new_context(**options) as context:
        watched = Watched(context, url)
        yield watched
        assert watched.page.title() == "kvferry router"
        assert watched.complaints == []
        assert {re.match("[a-z]+://[^/]*", each).group() for each in watched.urls if each[:5] != "data:"} == {
            url
        }  # type: ignore[union-attr]


def records(fleet: Fleet) -> list[Mapping[str, Any]]:
    """Return what the router tells the page of the finished requests."""
    status, body = fleet.router.get("/page/state")
    assert status == 200
    return list(json.loads(body)["finished"])


def ask(fleet: Fleet, prompt: str, **fields: Any) -> None:
    assert fleet.router.complete(prompt, max_tokens=4, **fields).status == 200


def test_a_request_appears_while_the_page_is_open_and_its_parts_add_up(
    browser: Browser, fleet: Fleet
) -> None:
    with watching(browser, fleet) as watched:
        page = watched.page
        num_before = page.locator("tr.row").count()
        if not num_before:
            assert "curl" in page.locator("#curl").inner_text()
        fleet.prefill.send_signal(signal.SIGSTOP)
        asking = threading.Thread(target=ask, args=(fleet, "Ferries cross water. " * 20))
        asking.start()
        try:
            page.locator(".tag.running").wait_for(timeout=WAIT_MS)
        finally:
            fleet.prefill.send_signal(signal.SIGCONT)
            asking.join()
        ended = page.locator("tr.row").filter(has_not_text="running")
        ended.nth(num_before).wait_for(timeout=WAIT_MS)
        one = records(fleet)[-1]
        parts = one["parts"]
        assert {part["kind"] for part in parts} >= {"prefill", "exposed", "decode"}
        assert not any(part["includes"] for part in parts)  # these nodes report everything
        assert one["hidden"]["ms"] > 0
        assert sum(part["ms"] for part in parts) == pytest.approx(one["total_ms"], abs=0.05)
        # The bars, too, follow each other without a gap, and those of the slowest request fill the width.
        page.get_by_role("radio", name="Full width each").check()
        boxes = (
            page.locator("tr.row")
            .first.locator(".track")
            .evaluate(
                "track => [...track.querySelectorAll('.seg:not(.first, .hidden-transfer)')]"
                ".map(one => [parseFloat(one.style.left), parseFloat(one.style.width)])"
            )
        )
        assert len(boxes) == len(parts)
        assert all(
            left + width == pytest.approx(other, abs=0.1) for (left, width), (other, _) in pairwise(boxes)
        )
        assert sum(boxes[-1]) == pytest.approx(100, abs=0.1)


def test_a_click_explains_a_request_as_the_command_does(
    browser: Browser, fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(fleet, "A ferry of its own")
    with watching(browser, fleet) as watched:
        watched.page.locator("button.toggle").first.click()
        account = watched.page.locator("tr.detail:visible .account")
        account.get_by_text("the first token came after").wait_for(timeout=WAIT_MS)
        shown = account.inner_text().splitlines()
    url = fleet.router.process.url
    assert main(["explain", records(fleet)[-1]["id"], url]) == 0
    # The command asks every node of the router, and the page those to which the request was sent.
    told = [line for line in capsys.readouterr().out.splitlines() if "503" not in line]
    assert sorted(map(str.strip, shown)) == sorted(map(str.strip, told))
    assert {fleet.prefill.url, fleet.decode.url} <= set(" ".join(shown).split())


def test_a_keyboard_and_a_screen_reader_reach_everything(browser: Browser, fleet: Fleet) -> None:
    from axe_playwright_python.sync_playwright import Axe

    ask(fleet, "A ferry")
    for scheme in ("light", "dark"):
        with watching(browser, fleet, color_scheme=scheme) as watched:
            button = watched.page.locator("button.toggle").first
            button.focus()
            watched.page.keyboard.press("Enter")
            assert button.get_attribute("aria-expanded") == "true"
            assert "Decode node" in watched.page.locator("tr.detail:visible").inner_text()
            watched.page.get_by_role("button", name="Pause").click()
            assert watched.page.get_by_role("button", name="Continue").is_visible()
            found = Axe().run(watched.page)
            assert found.violations_count == 0, found.generate_report()


def test_a_narrow_window_shows_everything_without_scrolling_sideways(browser: Browser, fleet: Fleet) -> None:
    ask(fleet, "A ferry", stream=False)
    with watching(browser, fleet, viewport={"width": 340, "height": 700}) as watched:
        watched.page.locator("button.toggle").first.click()
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= 340
        assert watched.page.locator(".track").first.bounding_box()["width"] > 250  # type: ignore[index]


def test_text_of_requests_and_nodes_is_shown_as_text(browser: Browser, fleet: Fleet) -> None:
    with watching(browser, fleet) as watched:
        request = urllib.request.Request(
            f"{fleet.router.process.url}/v1/completions",
            json.dumps({"prompt": "a", "max_tokens": 1}).encode(),
            {"Content-Type": "application/json", "X-Request-Id": HOSTILE},
        )
        urllib.request.urlopen(request, timeout=60).close()
        watched.page.get_by_text(HOSTILE, exact=True).first.wait_for(timeout=WAIT_MS)
        assert HOSTILE in watched.page.locator("#decode-nodes").inner_text()


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser, fleet: Fleet) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(f"{fleet.guarded.url}/")
        for key, state in (("wrong", "visible"), (KEY, "hidden")):
            page.get_by_label("Key").fill(key)
            page.keyboard.press("Enter")
            page.get_by_text("did not accept").wait_for(state=state, timeout=WAIT_MS)  # type: ignore[arg-type]
        page.locator("#content").wait_for(timeout=WAIT_MS)
        page.reload()
        page.locator("#content").wait_for(timeout=WAIT_MS)
        assert "$KEY" in page.locator("#curl").inner_text()
        assert KEY not in page.content()


def test_a_node_that_dies_is_shown_as_gone(browser: Browser, fleet: Fleet) -> None:
    with watching(browser, fleet) as watched:
        node = watched.page.locator(".node").filter(has_text=fleet.decode.url)
        assert "ready" in node.inner_text()
        fleet.decode.kill()
        node.locator(".gone").wait_for(timeout=WAIT_MS)
        assert "connection refused" in node.inner_text()
        assert f"decode node {fleet.decode.url} is gone" in watched.page.locator("#announce").inner_text()
        assert "no healthy pair" in watched.page.locator("#status").inner_text()
