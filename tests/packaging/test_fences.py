"""Every fenced block of the documents that a reader would run or save is given to what would read it.

Commands are parsed by the real parsers, JSON and TOML by the code that reads such a file, Python is compiled
and its imports of kvferry are resolved. A block that cannot be checked says why on the line above it: `<!--
not run: REASON -->`. Some pages have tests of their own that also execute their Python: `test_documents`,
`test_writing_a_transport`.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import itertools
import json
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

import pytest
import yaml

from kvferry.cli import config_file
from kvferry.cli.doctor import path_finder
from kvferry.cli.errors import UsageError
from kvferry.cli.main import commands_of, make_parser
from kvferry.cli.programs import PROGRAMS
from kvferry.connector.config import KVTransferConfig
from kvferry.connector.p2p.options import ConnectorOptions
from kvferry.router.nodes.membership import parse_nodes
from kvferry.transports.errors import ConfigurationError
from kvferry.transports.registry import BUILT_IN, check_options, load_transport

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(path for pattern in ("*.md", "docs/**/*.md", "docker/*.md") for path in ROOT.glob(pattern))
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\S*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
MARKER = re.compile(r"<!-- not run: (?P<reason>.{10,}) -->\n *$")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()

#: Programs of others. Of their commands only the quotes, and the files of this repository that they name, are
#: checked.
OTHERS = frozenset(
    [
        "cd",
        "chmod",
        "cp",
        "curl",
        "docker",
        "echo",
        "eval",
        "export",
        "git",
        "guidellm",
        "helm",
        "install",
        "ip",
        "kill",
        "kubectl",
        "lm_eval",
        "openssl",
        "printf",
        "pytest",
        "scp",
        "source",
        "systemctl",
        "systemd-sysusers",
        "vllm-router",
    ]
)
#: Programs that start the rest of their command line.
WRAPPERS = frozenset({"chrt", "ip"})
FOLDERS = frozenset(path.name for path in ROOT.iterdir() if path.is_dir()) - {"build"}


@dataclass(frozen=True)
class Fence:
    """A fenced block.

    Attributes:
        place: Its document and line.
        is_marked: Whether a comment says why it is not run.
    """

    place: str
    language: str
    text: str
    is_marked: bool


def fences() -> Iterator[Fence]:
    for document in DOCUMENTS:
        text = document.read_text()
        for found in FENCE.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            dedented = re.sub(rf"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
            is_marked = MARKER.search(text, 0, found.start()) is not None
            yield Fence(f"{document.relative_to(ROOT)}:{line}", found["language"], dedented, is_marked)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_stands_in_fences_only(document: Path) -> None:
    """Viewers show indented paragraphs as code as well, but they have no language."""
    text = FENCE.sub("", document.read_text())
    assert "```" not in text, "a fence is not closed"
    for paragraph in re.split(r"\n\s*\n", text):
        is_in_list = re.search(
            r"^ *([*-]|\d+\.) ", text[: text.index(paragraph)].rpartition("\n#")[2], re.MULTILINE
        )
        assert not paragraph.startswith("    ") or is_in_list, paragraph


@pytest.mark.parametrize("fence", list(fences()), ids=lambda fence: fence.place)
def test_a_block_is_accepted_by_what_reads_it(fence: Fence) -> None:
    assert fence.language in CHECKS, f"{fence.place} needs a language: one of {', '.join(CHECKS)}"
    if not fence.is_marked:
        CHECKS[fence.language](fence.text)


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("toml", "[top]\ninterval = 5\n"),
        ("toml", '[doctor]\nseconds = "soon"\n'),
        ("toml", "[nodes]\n"),
        ("json", '{"kv_connector": "tcp", "kv_role": "kv_both", "kv_connector_extra_config": {"lease": 1}}'),
        (
            "json",
            '{"kv_connector": "KvferryConnector", "kv_connector_extra_config": {"transport_options": {"a": 1}}}',
        ),
        ("python", "from kvferry.connector import NoSuchName"),
        ("python", "if True"),
        ("yaml", "containers: [{name: vllm, image: vllm, args: ['--kv-transfer-config={}}']}]"),
        ("diff", "- what stays\n+ kvferry serve --no-such-option"),
        ("sh", "kvferry doctor --no-such-option"),
        ("sh", "kvferry doctor --options '{\"no-such-path\": {}}'"),
        ("sh", "A=1 no-such-command"),
        ("sh", "kvferry demo && make no-such-target"),
        ("sh", "make demo NO_SUCH_VARIABLE=1"),
        ("sh", "make demo DEMO_ARGS='--no-such-option'"),
        ("sh", "pip install '.[no-such-extra]'"),
        ("sh", "ip netns exec slow python examples/router.py --no-such-option"),
        ("sh", "python -m kvferry.lab.bench.no_such_file"),
        ("sh", "docker compose -f docker/no-such-file.yaml up"),
        ("sh", "vllm serve MODEL --kv-transfer-config '{not JSON}'"),
        ("sh", "echo 'a quote that does not end"),
    ],
)
def test_what_would_not_work_is_found(language: str, text: str) -> None:
    with pytest.raises((AssertionError, ConfigurationError, SyntaxError, UsageError, ValueError)):
        CHECKS[language](text)


def test_commands_within_sentences_name_what_exists() -> None:
    """Two documents also name what is gone."""
    commands = commands_of(make_parser(with_options=PROGRAMS))
    checked = 0
    for document in DOCUMENTS:
        for code in re.findall(r"`((?:kvferry|make) [^`]+)`", FENCE.sub("", document.read_text())):
            program, name, *rest = code.split()
            if document.name in ("CHANGELOG.md", "upgrades.md") or not re.fullmatch(r"[a-z][a-z-]*", name):
                continue
            checked += 1
            if program == "make":
                assert re.search(rf"^{name}\b[^=]*:", MAKEFILE, re.MULTILINE), f"{document.name}: {code}"
            elif name in commands or len(rest) < 2:  # otherwise it is a sentence, such as an error
                assert name in commands, f"{document.name}: {code}"
                options = {word.partition("=")[0] for word in rest if re.match(r"--\w", word)}
                assert options <= commands[name]._option_string_actions.keys(), f"{document.name}: {code}"
    assert checked > 50


# -- shell -------------------------------------------------------------------------------------------


def check_shell(text: str) -> None:
    for words in commands_in(text):
        check_command(words)


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words of each command. A quoted word may contain line ends."""
    pending = ""
    for line in text.replace("\\\n", " ").splitlines():
        pending += line + "\n"
        lexer = shlex.shlex(pending, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        try:
            tokens = list(lexer)
        except ValueError:
            continue  # a quote is open
        pending = ""
        words: list[str] = []
        for token in [*tokens, ";"]:
            if set(token) <= set(";&|"):
                if words:
                    yield words
                words = []
            else:
                words.append(token)
    assert not pending, f"a quote does not end: {pending!r}"


def check_command(words: Sequence[str]) -> None:
    for word in words:
        name, _, rest = word.partition("/")
        assert not (name in FOLDERS and rest) or (ROOT / word).exists(), f"there is no {word}"
    while words and (assigned := re.fullmatch(r"[A-Z_]+=(.*)", words[0], re.DOTALL)):
        words = words[1:]
        if assigned[1].startswith("{"):
            check_json(assigned[1])
    if not words:
        return
    program, *arguments = (PurePath(words[0]).name, *words[1:])
    if program in PARSED:
        PARSED[program](arguments)
        return
    assert program in OTHERS | WRAPPERS or (ROOT / words[0]).is_file(), f"unknown program {words[0]!r}"
    if program in WRAPPERS:
        started = [place for place, word in enumerate(words) if PurePath(word).name in PARSED]
        if started:
            check_command(words[started[0] :])


class _ParsedError(Exception):
    """A program has accepted its command line; it does nothing more."""


def check_kvferry(arguments: Sequence[str]) -> None:
    options = parsed(make_parser(with_options=PROGRAMS), arguments)
    for option in ("kv_transfer_config", "transfer_config"):
        if (text := getattr(options, option, None)) and not text.startswith("@"):
            check_json(text)
    if hasattr(options, "options") and options.command in ("doctor", "bench"):
        for name in json.loads(options.options):
            path = path_finder(options.options)(name)
            check_options(path.scheme, path.options)


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    try:
        return parser.parse_args(arguments)
    except SystemExit as ended:
        if ended.code:
            raise UsageError(f"{parser.prog} refuses {shlex.join(arguments)}") from ended
        return argparse.Namespace()  # after --help


def check_python_command(arguments: Sequence[str]) -> None:
    """Let a program of this repository parse its command line, and go no further."""
    script = arguments[0]
    is_own_module = script == "-m" and arguments[1].startswith("kvferry.lab.")
    if is_own_module:
        arguments = arguments[1:]
        script = arguments[0]
    elif script in ("-m", "-c") or PurePath(script).name == "toy_proxy_server.py":
        return
    parse = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *given: Any) -> None:
        parse(parser, *given)
        raise _ParsedError

    is_accepted = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        patch.setattr(sys, "argv", [script, *arguments[1:]])
        try:
            if is_own_module:
                assert find_spec(script), f"there is no module {script}"
                for loaded in (script, f"{script}.__main__"):  # by another test
                    patch.delitem(sys.modules, loaded, raising=False)
                runpy.run_module(script, run_name="__main__")
            else:
                patch.syspath_prepend(str((ROOT / script).parent))
                runpy.run_path(str(ROOT / script), run_name="__main__")
            is_accepted = not arguments[1:]  # it has run, and takes no arguments
        except _ParsedError:
            is_accepted = True
        except SystemExit:
            pass  # argparse has said why
    assert is_accepted, f"{script} refuses {shlex.join(arguments[1:])}"


def check_make(arguments: Sequence[str]) -> None:
    """Ask make what it would run, and check these commands."""
    for name in (word.partition("=")[0] for word in arguments if "=" in word):
        assert re.search(rf"\$\({name}\)|\b{name}=", MAKEFILE), f"the Makefile has no variable {name}"
    done = subprocess.run(
        ["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        if re.search(r"/python (examples/|-m kvferry\.lab\.)", line):
            check_shell(line)


def check_pip(arguments: Sequence[str]) -> None:
    for extra in re.findall(r"(?:^\.|\.whl)\[(.*?)\]", "\n".join(arguments), re.MULTILINE):
        assert set(extra.split(",")) <= PROJECT["optional-dependencies"].keys(), extra


def check_vllm(arguments: Sequence[str]) -> None:
    for option, value in itertools.pairwise(arguments):
        if option in ("--kv-transfer-config", "--ec-transfer-config"):
            check_json(value)


PARSED: Mapping[str, Callable[[Sequence[str]], None]] = {
    "kvferry": check_kvferry,
    "make": check_make,
    "pip": check_pip,
    "python": check_python_command,
    "python3": check_python_command,
    "vllm": check_vllm,
}


# -- files -------------------------------------------------------------------------------------------


def check_json(text: str) -> None:
    """An ellipsis in braces stands for a mapping that the reader fills."""
    value = json.loads(text.replace("{…}", "{}"))
    if isinstance(value, dict) and "kv_connector" in value:
        check_transfer(value)


def check_transfer(transfer: Mapping[str, Any]) -> None:
    """Check what a node is given as `--kv-transfer-config`, and all options of our own connectors in it."""
    config = KVTransferConfig.from_mapping({"kv_role": "kv_both", **transfer})
    extra = config.kv_connector_extra_config
    if "connectors" in extra:
        for child in extra["connectors"]:
            check_transfer(child)
    schemes = {
        load_transport(scheme).__name__.replace("Transport", "Connector"): scheme for scheme in BUILT_IN
    }
    schemes |= {"KvferryConnector": "", **{scheme: scheme for scheme in BUILT_IN}}
    if config.kv_connector in schemes:
        options = ConnectorOptions.from_mapping(extra, schemes[config.kv_connector])
        check_options(options.transport, options.transport_options)


def check_toml(text: str) -> None:
    """A configuration file of `kvferry`, a list of nodes, or the `pyproject.toml` of a transport."""
    tables = tomllib.loads(text)
    if tables.keys() <= {"prefill", "decode"}:
        parse_nodes(text.encode(), is_json=False)
    elif tables.keys() != {"project"}:
        for command in tables:
            parser = make_parser(with_options=PROGRAMS)
            config_file.apply(tables, commands_of(parser), command)


def check_yaml(text: str) -> None:
    """Check each container of a pod, and what it gives to vLLM."""
    for container in yaml.safe_load(text)["containers"]:
        assert {"name", "image"} <= container.keys()
        for word in container.get("args", ()):
            option, _, value = word.partition("=")
            if option == "--kv-transfer-config":
                check_json(value)


def check_python(text: str) -> None:
    """Compile it; a method of a class may stand alone. What it imports of kvferry must be there."""
    tree = ast.parse(textwrap.dedent(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvferry"):
            for name in node.names:
                assert name.name in names_of(node.module or ""), f"{node.module} has no {name.name}"


def names_of(module: str) -> set[str]:
    """Return the names at the top of a module, which may need packages that are not installed here."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"there is no module {module}"
    assert spec.origin is not None
    found: set[str] = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found.update(name.asname or name.name for name in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def check_diff(text: str) -> None:
    """Check the commands that a reader is to have afterwards."""
    check_shell("".join(line[2:] + "\n" for line in text.splitlines() if line.startswith("+ ")))


def check_dockerfile(text: str) -> None:
    for line in text.splitlines():
        instruction, _, rest = line.partition(" ")
        assert instruction in ("FROM", "COPY", "RUN"), line
        if instruction == "RUN":
            check_shell(rest)


def check_promql(text: str) -> None:
    known = (ROOT / "docs" / "observing.md").read_text()
    for name in re.findall(r"kvferry_\w+", text):
        assert f"`{re.sub(r'_(bucket|sum|count)$', '', name)}`" in known, name


CHECKS: Mapping[str, Callable[[str], None]] = {
    "diff": check_diff,
    "dockerfile": check_dockerfile,
    "json": check_json,
    "promql": check_promql,
    "python": check_python,
    "sh": check_shell,
    "text": lambda text: None,  # what is printed, and pictures
    "toml": check_toml,
    "yaml": check_yaml,
}
