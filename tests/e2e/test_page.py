"""The router's page in a real browser, with a real router, real nodes and real requests."""

from __future__ import annotations

import http.server
import json
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from kvferry.cli.main import main
from kvferry.lab.servers import LaunchedProcess, Launcher, Spawn
from kvferry.router.seen.page import content_security_policy
from tests.e2e.conftest import START_TIMEOUT_S
from tests.support.browser import chromium, find_chromium
from tests.support.client import Client

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page, Route

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
    """One prefill node, one decode node that can be killed, a second one whose text is hostile, and their
    routers.

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
    told = [line for line in capsys.readouterr().out.splitlines() if "HTTP status 503" not in line]
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


# -- of a router that only exists in the answers that the page gets ------------------------------------

#: Nothing is asked there: the browser is answered by the test.
MADE_UP = "http://router.test"
#: The width of the widest row of a real account, which a page must scroll within itself.
LONG_LINE = (
    "0.0 ms  3916.3 ms  =====  router  prefill_call  node http://10.0.0.7:8100, " + "detail 1.2345, " * 20
)


def made_up_node(number: int, role: str, **fields: Any) -> dict[str, Any]:
    load = {"running": number % 5, "waiting": 0, "pool_usage": number % 90 / 100}
    known = {"kv_role": "kv_both" if role == "both" else None, "models": ["meta-llama/Llama-3.1-8B-Instruct"]}
    node = {"url": f"http://10.20.30.{number}:8100", "state": "ready", "why": "", "in_flight": number % 7}
    return {**node, "load": load, "sources": ["option"], "role": role, **known, **fields}


def made_up_nodes(num: int, num_in_trouble: int = 0) -> list[dict[str, Any]]:
    """Return a third of prefill nodes, a third of decode nodes, and a third that does both, which the router
    lists twice.
    """
    troubles = ("gone", "overloaded", "draining", "refused")
    why = "the connection was refused: is the process running, and does it listen at this address?"
    nodes = []
    for number in range(num):
        trouble = {"state": troubles[number % 4], "why": why} if number >= num - num_in_trouble else {}
        role = ("prefill", "decode", "both")[number % 3]
        one = made_up_node(number, role, **trouble)
        nodes += [{**one, "role": each} for each in (("prefill", "decode") if role == "both" else (role,))]
    return nodes


def made_up_request(number: int, **fields: Any) -> dict[str, Any]:
    prefill, decode = "http://10.20.30.0:8100", "http://10.20.30.1:8100"
    kinds = (
        ("routing", "", 20.0),
        ("queue", prefill, 30.0),
        ("prefill", prefill, 350.0),
        ("exposed", decode, 60.0),
    )
    parts, at = [], 0.0
    for kind, node, ms in (*kinds, ("decode", decode, 900.0 + 40 * number)):
        parts.append({"kind": kind, "node": node, "start_ms": at, "ms": ms, "includes": []})
        at += ms
    return {
        "number": number, "id": f"3f2b9c1e-request-with-a-long-id-that-a-client-chose-{number}", "path": "/v1/chat/completions",
        "arrived_at": 1.8e9 + number, "is_done": True, "status": 200, "error": "", "attempts": 1,
        "placement": "handover: local would take 1515 ms more in all; first token 412 ms, others delayed 0.0 ms, 0.12 requests late",
        "prefill": prefill, "decode": decode, "prompt_tokens": 1320, "output_tokens": 64, "pieces": 64, "longest_pause_ms": 45.0,
        "total_ms": at, "first_token_ms": 461.0, "parts": parts, "hidden": {"start_ms": 200.0, "ms": 190.0},
        "transfer": {"transport": "shm", "mechanism": "mapped", "bytes": 66_000_000, "ms": 250.0}, **fields,
    }  # fmt: skip


def made_up_state(nodes: Sequence[Mapping[str, Any]], *requests: Mapping[str, Any]) -> dict[str, Any]:
    seconds = {name: [7] * 120 for name in ("done", "failed", "output_tokens", "bytes")}
    slots = [
        None if slot < 5 else [35.0 + slot, 60.0 + 2 * slot, 120.0 + 90 * (slot % 7)] for slot in range(30)
    ]
    latency = {"all": [48.0, 92.0, 610.0], "slots": slots}
    latencies = {"slot_s": 10, "first": latency, "next": {"all": None, "slots": [None] * 30}}
    return {
        "run": "1", "version": "0.1.0", "now": time.time(), "uptime_s": 4000.0, "status": "ok", "is_ready": True,
        "nodes": nodes, "last": len(requests), "keeps": 200, "num_in_flight": 0, "in_flight": [], "history": seconds,
        "finished": requests, "latencies": latencies,
    }  # fmt: skip


@contextmanager
def showing(browser: Browser, state: Mapping[str, Any], **options: Any) -> Iterator[Page]:
    """Open the page of a router that says `state`, and explains each request in long lines."""
    html = (files("kvferry.router.seen") / "page.html").read_text(encoding="utf-8")
    explained = {"lines": ["request r7", "", *[LONG_LINE] * 30]}

    def answer(route: Route) -> None:
        path = route.request.url.removeprefix(MADE_UP)
        if path == "/":
            headers = {"Content-Security-Policy": content_security_policy(html), "Content-Type": "text/html"}
            route.fulfill(body=html, headers=headers)
        else:
            said = (
                explained
                if "explain" in path
                else {**state, "finished": state["finished"] if "since=0" in path else []}
            )
            route.fulfill(body=json.dumps(said), content_type="application/json")

    with browser.new_context(**options) as context:
        context.route("**/*", answer)
        watched = Watched(context, MADE_UP)
        yield watched.page
        assert watched.complaints == []


@pytest.mark.parametrize("width", [340, 390, 1280, 1440])
@pytest.mark.parametrize("num_nodes", [3, 50])
def test_no_click_makes_the_page_wider_than_its_window(browser: Browser, width: int, num_nodes: int) -> None:
    failed = made_up_request(
        2, status=503, error="no node: http://10.20.30.0:8100: " + "connection_refused" * 20
    )
    state = made_up_state(made_up_nodes(num_nodes, num_nodes // 6), made_up_request(1), failed)
    with showing(browser, state, viewport={"width": width, "height": 900}) as page:

        def check() -> None:
            assert page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [width, width]

        check()
        for control in page.locator("#content").locator("summary, fieldset label, button").all():
            control.click(timeout=WAIT_MS)
            check()
        page.locator(".account").nth(1).get_by_text("request r7").wait_for(timeout=WAIT_MS)
        page.locator(".account").nth(0).get_by_text("request r7").wait_for(timeout=WAIT_MS)
        check()


def test_the_header_counts_the_nodes_that_are_ready_and_says_what_the_others_are(browser: Browser) -> None:
    with showing(browser, made_up_state(made_up_nodes(50, 8))) as page:
        assert page.locator("#status .says").inner_text() == (
            "42 of 50 nodes ready: 2 gone, 2 refused, 2 overloaded, 2 draining"
        )
        assert "doubt" in (page.locator("#status").get_attribute("class") or "")
    with showing(browser, made_up_state(made_up_nodes(3))) as page:
        assert page.locator("#status .says").inner_text() == "3 of 3 nodes ready"
        assert page.locator("#status").get_attribute("class") == "status "
    with showing(browser, {**made_up_state(made_up_nodes(3)), "status": "ok, but no cache arrives"}) as page:
        assert page.locator("#status .says").inner_text() == "3 of 3 nodes ready · no cache arrives"
    with showing(
        browser, {**made_up_state([]), "status": "no healthy pair of nodes", "is_ready": False}
    ) as page:
        assert page.locator("#status .says").inner_text() == "no healthy pair of nodes · 0 of 0 nodes ready"


def test_nodes_in_trouble_come_first_and_equal_healthy_ones_are_one_line(browser: Browser) -> None:
    with showing(browser, made_up_state(made_up_nodes(50, 8))) as page:
        for role in ("prefill", "decode", "both"):
            states = page.locator(f"#{role}-nodes > li .state:visible").all_inner_texts()
            assert states[-1].endswith("ready")
            assert not any(state.endswith("ready") for state in states[:-1])
        fold = page.locator("#prefill-nodes summary")
        assert "14 nodes" in fold.inner_text()
        assert "in flight, 0 to 6 each" in fold.inner_text()
        assert page.get_by_text("http://10.20.30.0:8100").is_hidden()
        # Unfolded by the keyboard, it stays so, with the focus, while the page goes on asking.
        fold.focus()
        page.keyboard.press("Enter")
        assert page.get_by_text("http://10.20.30.0:8100").is_visible()
        with page.expect_response("**/page/state?since=*", timeout=WAIT_MS):
            pass
        with page.expect_response("**/page/state?since=*", timeout=WAIT_MS):
            pass
        assert page.get_by_text("http://10.20.30.0:8100").is_visible()
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"


def test_a_node_that_does_both_is_drawn_once_and_without_an_arrow(browser: Browser) -> None:
    nodes = [made_up_node(number, role) for number in range(3) for role in ("prefill", "decode")]
    nodes[1] |= {"state": "refused", "why": "it is a prefill node"}
    with showing(browser, made_up_state(nodes)) as page:
        assert page.locator(".node").count() == 3
        assert page.locator("#apart").is_hidden()
        (first, *_) = page.locator("#both-nodes .node").all_inner_texts()
        assert "refused" in first
        assert "as decode node: it is a prefill node" in first
        assert "2 of 3 nodes ready" in page.locator("#status").inner_text()


def test_percentiles_are_lines_that_are_told_apart_without_colours(browser: Browser) -> None:
    with showing(browser, made_up_state(made_up_nodes(3))) as page:
        assert page.locator("#first-keys li").all_inner_texts() == [
            "p50\n48.0 ms",
            "p90\n92.0 ms",
            "p99\n610 ms",
        ]
        dashes = {
            page.locator(f"#first-plot path.{name}").evaluate(
                "path => getComputedStyle(path).strokeDasharray"
            )
            for name in ("p50", "p90", "p99")
        }
        assert len(dashes) == 3
        assert "none in the last five minutes" in page.locator("#next-plot").inner_text()


def test_each_request_says_where_it_was_placed(browser: Browser) -> None:
    requests = [
        made_up_request(1),
        made_up_request(2, prefill=""),
        made_up_request(3, prefill="http://10.20.30.1:8100"),
        made_up_request(4, prefill="", decode=""),
    ]
    with showing(browser, made_up_state(made_up_nodes(3), *requests)) as page:
        assert page.locator("td.way").all_inner_texts() == ["–", "local", "local", "handover"]
        looks = {
            page.locator(f".legend .dot.{way}").evaluate(
                "dot => [getComputedStyle(dot).backgroundColor, getComputedStyle(dot).clipPath].join()"
            )
            for way in ("local", "handover")
        }
        assert len(looks) == 2
        assert "local would take 1515 ms more" in (page.locator("td.way").last.get_attribute("title") or "")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_fifty_nodes_are_read_by_a_screen_reader(browser: Browser, scheme: Any) -> None:
    from axe_playwright_python.sync_playwright import Axe

    lost = {"kind": "lost", "node": "http://10.20.30.2:8100", "start_ms": 0.0, "ms": 9.0, "includes": []}
    requests = [made_up_request(1), made_up_request(2, prefill="", parts=[lost])]
    with showing(browser, made_up_state(made_up_nodes(50, 8), *requests), color_scheme=scheme) as page:
        page.locator("summary").first.click()
        page.locator("button.toggle").first.click()
        assert "lost call" in page.locator("tr.detail:visible").inner_text()
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
