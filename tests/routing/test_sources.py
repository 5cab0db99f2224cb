"""How the router learns of nodes: options, a file, DNS names, and how these contributions add up."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp.abc import AbstractResolver
from hypothesis import given
from hypothesis import strategies as st

from kvferry.router.main import main
from kvferry.router.nodes.membership import (
    BadNodesError,
    Contributions,
    DnsTarget,
    Role,
    parse_nodes,
    parse_target,
)
from kvferry.router.nodes.sources import DnsName, LookUpError, NodesFile
from tests.support.fake_dns import Names

A, B, C = (f"http://10.0.0.{number}:8100" for number in (1, 2, 3))


# -- contributions -----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["file", "admin", "dns"]), st.sets(st.sampled_from([A, B, C])))))
def test_changes_add_up_to_what_the_sources_name(updates: list[tuple[str, set[str]]]) -> None:
    nodes = Contributions()
    present: frozenset[str] = frozenset()
    for source, urls in updates:
        change = nodes.update(source, urls)
        assert change.added.isdisjoint(present)
        assert change.dropped <= present
        present = (present | change.added) - change.dropped
    last = dict(updates)
    assert present == nodes.urls() == set().union(*last.values())


# -- what users write --------------------------------------------------------------------------------


def test_an_option_names_a_url_or_a_dns_name_with_a_port() -> None:
    assert parse_target(f"{A}/") == A
    assert parse_target("dns://prefill.models.svc:8100") == DnsTarget("prefill.models.svc", 8100)
    assert parse_target("dns+https://prefill:8100") == DnsTarget("prefill", 8100, "dns+https")
    for wrong in (
        "localhost",
        "ftp://x:1",
        "dns://prefill",
        "dns://:8100",
        "dns://prefill:8100/path",
        "http://[::",
    ):
        with pytest.raises(ValueError, match="give one such as"):
            parse_target(wrong)


NO_NODES = [
    "http://user:secret@h:1",
    "http://:secret@h:1",
    "http://user:sec/secret@h:1",
    "user:secret@h:1",
    "http://secret@h",
    "http://h:1/path",
    "http://h:1//",
    "http://h:1?key=secret",
    "http://h:1#secret",
    'http://h"o:1',
    "http://h'o:1",
    "http://<b>:1",
    "http://h:1\n",
    "http://h o:1",
    "http://h:",
    "http://h:65536",
    "dns://user:secret@h:1",
    "dns://h:1?secret",
]


@pytest.mark.parametrize("url", NO_NODES)
def test_a_url_with_more_than_a_host_and_a_port_is_refused_without_showing_its_secrets(url: str) -> None:
    sources: list[Callable[[], object]] = [
        lambda: parse_target(url),
        lambda: parse_nodes(json.dumps({"prefill": [url]}).encode(), is_json=True),
        lambda: parse_nodes(json.dumps({"prefill": url}).encode(), is_json=True),
        lambda: parse_nodes(json.dumps({"prefill": [[url]]}).encode(), is_json=True),
        lambda: parse_nodes(json.dumps({url: []}).encode(), is_json=True),
    ]
    for read in sources:
        with pytest.raises(BadNodesError) as refused:
            read()
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://h",
        "https://h:443",
        "http://10.0.0.1:8100",
        "http://[::1]:8100",
        "http://[fe80::1%25eth0]:8100",
    ],
)
def test_a_url_of_a_host_and_a_port_is_taken_as_it_is(url: str) -> None:
    assert parse_target(url) == parse_target(f"{url}/") == url


@pytest.mark.parametrize(
    ("text", "is_json"),
    [
        (f'prefill = ["{A}/"]\ndecode = ["{B}", "{C}"]\n', False),
        (f'{{"prefill": ["{A}"], "decode": ["{B}", "{C}"]}}', True),
        ("\n", False),
        ("\n", True),
    ],
)
def test_a_list_of_nodes_is_toml_or_json(text: str, is_json: bool) -> None:
    named = {"prefill": (A,), "decode": (B, C)} if text.strip() else {"prefill": (), "decode": ()}
    assert parse_nodes(text.encode(), is_json=is_json) == named


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is no JSON"),
        ("[" * 10_000, "is no JSON"),
        ("[]", "got list"),
        ('{"prefil": []}', "unknown key 'prefil'"),
        ('{"prefill": "http://x"}', "'prefill' must be a list"),
        ('{"decode": [3]}', "'decode' must contain URLs"),
        ('{"decode": ["10.0.0.1:8100"]}', "not the URL of a node"),
    ],
)
def test_a_broken_list_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_nodes(text.encode(), is_json=True)


# -- the file ----------------------------------------------------------------------------------------


class Heard:
    """Remembers what a source has contributed last."""

    def __init__(self) -> None:
        self.last: Mapping[Role, Collection[str]] = {}
        self.times = 0

    def __call__(self, source: str, nodes: Mapping[Role, Collection[str]]) -> None:
        self.last = nodes
        self.times += 1


async def test_a_broken_file_keeps_the_last_good_list_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path, heard = tmp_path / "nodes.toml", Heard()
    path.write_text(f'prefill = ["{A}"]')
    source = NodesFile(path)
    await source.refresh(heard)
    path.write_text('prefill = ["')
    for _ in range(3):
        await source.refresh(heard)
    assert heard.last == {"prefill": (A,), "decode": ()}
    assert "is no TOML" in source.problem
    (line,) = [record.getMessage() for record in caplog.records]
    assert str(path) in line
    assert "keeps the nodes that it read there last" in line
    path.unlink()
    await source.refresh(heard)
    assert "No such file" in source.problem
    path.write_text(f'decode = ["{B}"]')
    await source.refresh(heard)
    assert (heard.last, source.problem) == ({"prefill": (), "decode": (B,)}, "")


def test_a_file_that_is_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_bytes(b" " * (2 << 20))
    with pytest.raises(LookUpError, match="more than 1048576 bytes"):
        NodesFile(path).read()


async def test_a_source_looks_again_and_again(tmp_path: Path) -> None:
    path, heard = tmp_path / "nodes.json", Heard()
    path.write_text(f'{{"prefill": ["{A}"]}}')
    running = asyncio.create_task(NodesFile(path, interval_s=0.001).run(heard))
    try:
        await until_last(heard, {"prefill": (A,), "decode": ()})
        path.write_text(f'{{"decode": ["{B}"]}}')
        await until_last(heard, {"prefill": (), "decode": (B,)})
    finally:
        running.cancel()


async def until_last(heard: Heard, nodes: Mapping[Role, Collection[str]]) -> None:
    async with asyncio.timeout(20):
        while heard.last != nodes:
            await asyncio.sleep(0.001)


# -- DNS ---------------------------------------------------------------------------------------------


def dns(resolver: AbstractResolver | None, name: str = "prefill") -> DnsName:
    return DnsName("prefill", DnsTarget(name, 8100), 5.0, resolver)


async def test_each_address_of_a_dns_name_is_a_node() -> None:
    names, heard = Names("10.0.0.1", "10.0.0.2"), Heard()
    source = dns(names)
    await source.refresh(heard)
    assert heard.last == {"prefill": {A, B}}
    names.addresses = ("10.0.0.3",)
    await source.refresh(heard)
    assert heard.last == {"prefill": {C}}


async def test_a_node_with_addresses_of_both_families_counts_once() -> None:
    heard = Heard()
    await dns(Names("10.0.0.1", "fd00::1")).refresh(heard)
    assert heard.last == {"prefill": {A}}
    await dns(Names("fd00::1")).refresh(heard)
    assert heard.last == {"prefill": {"http://[fd00::1]:8100"}}


@pytest.mark.parametrize("failure", [OSError(None, "Temporary failure"), ()], ids=["error", "no address"])
async def test_a_name_that_cannot_be_resolved_keeps_its_nodes(failure: Any) -> None:
    names, heard = Names("10.0.0.1"), Heard()
    source = dns(names)
    await source.refresh(heard)
    names.addresses = failure
    await source.refresh(heard)
    assert heard.times == 1
    assert "cannot resolve 'dns://prefill:8100'" in source.problem


async def test_names_are_resolved_as_the_system_does() -> None:
    heard = Heard()
    await dns(None, "localhost").refresh(heard)
    assert heard.last == {"prefill": {"http://127.0.0.1:8100"}}


# -- the command line --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ["--nodes-file", "/no/such.toml"],
            "cannot read --nodes-file '/no/such.toml': No such file or directory",
        ),
        (["--prefill", "dns://prefill"], "'dns://prefill' is not a DNS name with a port"),
        (["--decode", "localhost"], "'localhost' is not the URL of a node"),
        (["--check-interval-s", "0"], "--check-interval-s 0: it must be positive seconds"),
        (["--check-timeout-s", "0"], "--check-timeout-s"),
        (["--answer-timeout-s", "-1"], "--answer-timeout-s"),
        (["--drain-timeout-s", "nan"], "--drain-timeout-s"),
        (["--answer", "1"], "--answer"),
    ],
)
def test_a_router_does_not_start_with_options_that_cannot_work(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    node = "http://127.0.0.1:1"
    try:
        status = main(["--port", "0", "--prefill", node, "--decode", node, *words])
    except SystemExit as end:  # argparse's own refusal
        status = int(end.code or 0)
    assert status == 2
    assert why in capsys.readouterr().err
