"""The configuration file, and what the programs of `kvferry.lab` need."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import config_file
from kvferry.cli.errors import UsageError
from kvferry.cli.main import commands_of, main, make_parser
from kvferry.cli.programs import PROGRAMS, Program


def _parsed(tables: dict[str, Any], *argv: str) -> Any:
    parser = make_parser()
    config_file.apply(tables, commands_of(parser), argv[0])
    return parser.parse_args(argv)


def test_the_file_gives_defaults_and_the_command_line_wins() -> None:
    tables = {
        "bench": {"path": ["shm", "tcp"], "seconds": 3, "json": True, "options": {"tcp": {"tls": "on"}}}
    }
    found = _parsed(tables, "bench", "--seconds", "0.5")
    assert (found.path, found.seconds, found.json) == (["shm", "tcp"], 0.5, True)
    assert found.options == '{"tcp": {"tls": "on"}}'
    assert not _parsed(tables, "version").json


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"docter": {}}, "[docter] names no command: did you mean 'doctor'?"),
        ({"bench": {"second": 1}}, "[bench] has no option 'second': did you mean 'seconds'?"),
        ({"bench": {"seconds": -1}}, "[bench] seconds=-1: must be a positive number"),
        ({"doctor": {"path": "shm"}}, "[doctor] path='shm': it must be a list"),
        ({"doctor": {"path": ["smh"]}}, "it must be one of shm,"),
        ({"doctor": {"json": 1}}, "[doctor] json=1: it must be true or false"),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tables: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError) as refused:
        _parsed(tables, "bench" if "bench" in tables else "doctor")
    assert named in str(refused.value)


def test_the_file_is_found_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config" / "kvferry" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("[version]\njson = true\n")
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("{")
    other = tmp_path / "other.toml"
    other.write_text("[version]\njson = false\n")
    monkeypatch.setenv("KVFERRY_CONFIG", str(other))
    assert main(["version"]) == 0
    assert not capsys.readouterr().out.startswith("{")
    assert main(["--config", str(tmp_path / "none.toml"), "version"]) == 2
    assert "--config=" in capsys.readouterr().err
    file.write_text("[version\n")
    assert main(["--config", str(file), "version"]) == 2
    assert "is no TOML" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a = " + "[" * 100_000, "is no TOML of ours: it has more than 16 levels"),
        ("a = " + "1" * 5000, "a number of more than 4096 bits"),
        ("bench.seconds = 0x" + "f" * 20_000, "a number of more than 4096 bits"),
        ("doctor." + "a." * 5000 + "b = 1", "it has more than 16 levels"),
        ("doctor.options.tcp.port = 2026-01-01", "[doctor] options="),
    ],
)
def test_a_file_that_no_command_can_use_is_refused_without_a_traceback(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    assert main(["--config", str(file), "doctor"]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--config", "--api-key-file"])
def test_a_device_without_an_end_is_not_read_for_ever(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [option, "/dev/zero"]
    command = ["explain", "id", "http://127.0.0.1:9"]
    assert main([*words, *command] if option == "--config" else [*command, *words]) == 2
    assert f"{option}='/dev/zero' cannot be read: it has more than 16777216 bytes" in capsys.readouterr().err


def test_words_of_the_command_line_do_not_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["doctor", "--\x1b[2J"], ["\x1b[2J"], ["plan", "--rate", "\x1b[2J"]):
        with pytest.raises(SystemExit):
            main(words)
        error = capsys.readouterr().err
        assert "\x1b" not in error
        assert "[2J" in error


# -- the programs of kvferry.lab -----------------------------------------------------------------------


def test_the_file_gives_defaults_to_a_program_also_for_repeated_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text('[router]\nprefill = ["http://a", "http://b"]\nreuse-port = true\n')
    monkeypatch.setenv("KVFERRY_CONFIG", str(tmp_path / "config.toml"))
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(Program, "run", lambda self, arguments: seen.append(arguments) or 0)
    assert main(["router", "--decode", "http://c"]) == 0
    assert main(["router", "--decode", "http://c", "--prefill", "http://d"]) == 0
    assert [(found.prefill, found.decode, found.reuse_port) for found in seen] == [
        (["http://a", "http://b"], ["http://c"], True),
        (["http://d"], ["http://c"], True),
    ]


def test_a_program_whose_packages_are_missing_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, extra in (("serve", "lab"), ("router", "router")):
        monkeypatch.setattr(PROGRAMS[name], "needs", ("numpy", "no_such_package", "nor_this"))
        assert main([name]) == 1
        error = capsys.readouterr().err
        assert f"kvferry {name} needs no_such_package and nor_this, which are not installed" in error
        assert f"pip install '.[{extra}]'" in error


def test_programs_need_what_the_extra_installs() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = {
        extra: {name.partition(">=")[0].replace("-", "_") for name in project["optional-dependencies"][extra]}
        for extra in ("router", "lab")
    }
    others = {"kvferry[router]", "kvferry[torch]"}
    assert set(PROGRAMS["router"].needs) == extras["router"]
    assert set(PROGRAMS["serve"].needs) == extras["lab"] - others | {"torch"} | extras["router"]


def test_a_router_and_the_help_of_a_node_need_no_package_of_the_reference_engine() -> None:
    others = set(PROGRAMS["serve"].needs) - set(PROGRAMS["router"].needs)
    code = (
        f"import sys\nfor name in {sorted(others)}: sys.modules[name] = None\n"
        "import kvferry.router.main, kvferry.router.app\nfrom kvferry.cli.main import main\nmain(sys.argv[1:])"
    )
    for words in (["serve", "--help"], ["router", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "usage: kvferry" in done.stdout


def test_help_and_wrong_options_need_no_pytorch() -> None:
    code = "import sys; from kvferry.cli.main import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    for words in (["--help"], ["serve", "--rol", "x"], ["demo", "--help"], ["router", "--port", "x"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60
        )
        assert done.stdout.splitlines()[-1] == "False"
        assert done.returncode == (0 if "--help" in words else 2)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("serve --modl x", "unrecognized arguments: --modl x: did you mean --model?"),
        ("bench --secondz=3", "unrecognized arguments: --secondz=3: did you mean --seconds?"),
        ("serve --role both --connector smh", "unknown connector 'smh': did you mean 'shm'?"),
        (
            "serve --role both --connector-option leas_s=3",
            "unknown connector option 'leas_s': did you mean 'lease_s'?",
        ),
    ],
)
def test_a_word_that_is_nearly_right_is_corrected_before_pytorch_is_imported(words: str, says: str) -> None:
    code = (
        "import sys; from kvferry.cli.main import main\n"
        "try: status = main(sys.argv[1:])\n"
        "except SystemExit as ended: status = ended.code\n"
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words.split()], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
