"""Log lines as JSON objects."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from kvferry.router.http import serving
from kvferry.router.http.log_lines import LineFormatter
from kvferry.router.http.logs import JsonFormatter, _SdkFilter
from kvferry.router.http.tracing import name_request, request_id_in_logs


@pytest.fixture(autouse=True)
def no_request() -> Iterator[None]:
    token = request_id_in_logs.set("")
    yield
    request_id_in_logs.reset(token)


def _record(message: str, *args: object, **more: object) -> logging.LogRecord:
    record = logging.LogRecord("kvferry.x", logging.WARNING, "x.py", 1, message, args, None)
    vars(record).update(more)
    return record


def test_a_line_says_when_where_and_about_which_request() -> None:
    formatter = JsonFormatter("decode")
    line = json.loads(formatter.format(_record("load of %s failed:\n%s", "é", 'a "reason"')))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "program": "decode",
        "logger": "kvferry.x",
        "message": 'load of é failed:\na "reason"',
    }
    name_request("of the HTTP request")
    assert json.loads(formatter.format(_record("a")))["request_id"] == "of the HTTP request"
    told = _record("a", request_id="of the engine")
    assert json.loads(formatter.format(told))["request_id"] == "of the engine"


FOREIGN = "no\n00:00:00 router ERROR forged\x1b[2J\x9b2J\u2028forged"


def test_a_line_of_text_is_one_line_whatever_it_quotes() -> None:
    text = LineFormatter("router").format(_record("the node says: %s", FOREIGN))
    assert "the node says: no\\n00:00:00 router ERROR forged\\x1b" in text
    assert text.isprintable()


def test_no_line_of_a_traceback_looks_like_one_of_the_log() -> None:
    try:
        raise ValueError(FOREIGN)
    except ValueError:
        text = LineFormatter("router").format(_record("failed", exc_info=sys.exc_info()))
    first, *more = text.split("\n")
    assert first.endswith("router WARNING failed")
    assert any("ValueError: no" in line for line in more)
    assert all(line.startswith("    ") and line.isprintable() for line in more)


def test_json_is_plain_ascii() -> None:
    text = JsonFormatter("router").format(_record("the node says: %s", FOREIGN))
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text)["message"].endswith(FOREIGN)


def test_a_traceback_is_part_of_the_object() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        text = JsonFormatter("p").format(_record("a", exc_info=sys.exc_info()))
    assert len(text.splitlines()) == 1
    assert json.loads(text)["exception"].endswith("ValueError: why")


def test_what_a_program_prints_is_json_as_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "form_of_lines", JsonFormatter("router").line)
    serving.say("listening")
    serving.say("router: error: no", sys.stderr)
    printed = capsys.readouterr()
    lines = [json.loads(text) for text in (printed.out, printed.err)]
    assert [(line["level"], line["message"]) for line in lines] == [
        ("info", "listening"),
        ("error", "router: error: no"),
    ]


def test_a_collector_that_is_away_is_logged_once_a_minute() -> None:
    sdk_filter = _SdkFilter()
    records = [_record("no collector", name="opentelemetry.exporter", created=at) for at in (100, 110, 161)]
    assert [sdk_filter.filter(record) for record in records] == [True, False, True]
    assert sdk_filter.filter(_record("ours"))
