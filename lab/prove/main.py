"""`kvferry prove`: rounds of rows until each cell has been tried often enough, and the tables."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from kvferry.lab.client import BrokenAnswerError
from kvferry.lab.demo.near_tie import tolerance_of
from kvferry.lab.load import Progress
from kvferry.lab.machine import about
from kvferry.lab.servers import Launcher, LaunchError
from kvferry.transports.checked import printable
from kvferry.transports.errors import ConfigurationError

from .lab import Lab, NotApplicableError, OfferError, Settings, SingleServerError, parse_environments
from .models import write_tiny_image_model, write_tiny_model
from .outcomes import BAD, Outcome, Verdict
from .presets import SERVERS, Connector, connector_of
from .results import Results, Target, markdown
from .rows import AFTERWARDS, ROWS, Row, judge_rest_of

SHORT_REPEATS: Final = 5
SHORT_MINUTES: Final = 10.0
_INTERRUPTED: Final = 130


def run(arguments: argparse.Namespace, program: str = "kvferry prove") -> int:
    """Try everything that the options ask for; return the exit status."""
    try:
        return _run(arguments, program)
    except (ConfigurationError, LaunchError, SingleServerError, BrokenAnswerError) as error:
        print(printable(f"{program}: {error}", keep="\n"), file=sys.stderr)
        return 2 if isinstance(error, ConfigurationError) else 1


def _run(arguments: argparse.Namespace, program: str) -> int:
    folder = Path(arguments.out).absolute()
    connector = connector_of(
        arguments.preset,
        arguments.transfer_config,
        arguments.lease_s,
        False if arguments.no_params else None,
    )
    wanted = select(arguments.only)
    urls = urls_of(arguments.url)
    router_url = urls.pop("router", "")
    if not urls:
        _require(connector)
    elif connector.load:
        raise ConfigurationError(
            f"--preset {connector.name} needs servers that the kit starts, because requests name a port of theirs: "
            "leave out --url",
            key="--preset",
            value=connector.name,
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "logs").mkdir(exist_ok=True)
    results = Results(folder)
    target = results.targets.setdefault(connector.name, Target())
    target.about, target.transfer = connector.about, connector.transfer
    target.command = command(program, arguments)
    if arguments.short:
        arguments.repeats = SHORT_REPEATS
    status = 0
    try:
        with _interruptible(), Launcher(logs=folder / "logs") as launcher:
            settings = _settings(arguments, connector, folder, urls, router_url)
            _try(settings, launcher, arguments, wanted, results, target)
    except KeyboardInterrupt:
        print("\ninterrupted: all servers have ended; what is complete:", file=sys.stderr)
        status = _INTERRUPTED
    return _tell(results, folder) or status


def select(only: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return row → stages to try.

    Raises:
        ConfigurationError: a row or a stage is unknown.
    """
    found: dict[str, list[str]] = {}
    for word in only or list(ROWS):
        name, _, stage = word.partition("/")
        row = _row(name)
        if stage and stage not in row.columns:
            raise ConfigurationError(
                f"--only: the row {name!r} has no stage {stage!r}; it has {', '.join(row.columns)}",
                key="--only",
                value=word,
            )
        stages = found.setdefault(name, [])
        stages += [
            each for each in ((stage,) if stage else row.stages) if each not in stages and each != AFTERWARDS
        ]
    return {name: tuple(stages) for name, stages in found.items()}


def _row(name: str) -> Row:
    if name not in ROWS:
        raise ConfigurationError(
            f"--only: no row is called {name!r}; there are {', '.join(ROWS)}", key="--only", value=name
        )
    return ROWS[name]


def urls_of(words: Sequence[str]) -> dict[str, str]:
    """Read the words of `--url`: side → URL.

    Raises:
        ConfigurationError: a word is not SIDE=URL, or some servers are named and others are not.
    """
    found: dict[str, str] = {}
    for word in words:
        side, equals, url = word.partition("=")
        if not equals or side not in (*SERVERS, "router"):
            raise ConfigurationError(
                f"--url must be SIDE=URL with one of {', '.join(SERVERS)} and router, got {word!r}",
                key="--url",
                value=word,
            )
        found[side] = url
    missing = [side for side in SERVERS if side not in found]
    if 0 < len(missing) < len(SERVERS):
        raise ConfigurationError(
            f"--url {missing[0]}=URL is missing: give the URLs of all three servers, or of none",
            key="--url",
            value=missing[0],
        )
    return found


def _require(connector: Connector) -> None:
    """Raise ConfigurationError if a package is missing that the servers need."""
    for module in filter(None, ("vllm", connector.needs)):
        if importlib.util.find_spec(module) is None:
            raise ConfigurationError(
                f"cannot try {connector.name!r}: the module {module!r} is not installed beside kvferry: install it, or "
                "run kvferry in an environment that has it",
                key="--preset",
                value=connector.name,
            )


def _settings(
    arguments: argparse.Namespace,
    connector: Connector,
    folder: Path,
    urls: Mapping[str, str],
    router_url: str,
) -> Settings:
    is_tiny = arguments.model == "tiny"
    model = arguments.model
    if is_tiny and not urls:
        write, name = (
            (write_tiny_image_model, "tiny-image-model")
            if connector.encodes
            else (write_tiny_model, "tiny-model")
        )
        model = str(write(folder / name))
    environments = parse_environments(arguments.env)
    return Settings(
        connector,
        arguments.policy,
        model,
        is_tiny,
        folder,
        urls,
        [*(() if is_tiny else ("--dtype", arguments.dtype)), *shlex.split(arguments.serve_args)],
        # The other prefill server takes the place of the first one.
        {**environments, "stranger": environments["prefill"]},
        router_url,
        arguments.deadline_s,
        tolerance=tolerance_of(arguments.dtype),
    )


def command(program: str, arguments: argparse.Namespace) -> str:
    """Return the command that repeats what these options ask for, without `--only` and what says how
    often.
    """
    words = program.split()
    left_out = {
        "only",
        "short",
        "seed",
        "out",
        "repeats",
        "config",
        "command",
        "run",
    }
    defaults = _defaults()
    for name, value in vars(arguments).items():
        if name in left_out or value == defaults.get(name):
            continue
        option = "--" + name.replace("_", "-")
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [option, *(f"{each:g}" if isinstance(each, float) else str(each) for each in values)]
    return shlex.join(words)


def _defaults() -> dict[str, object]:
    from .cli import configure

    parser = argparse.ArgumentParser()
    configure(parser)
    return vars(parser.parse_args([]))


# -- trying ------------------------------------------------------------------------------------------


def _try(
    settings: Settings,
    launcher: Launcher,
    arguments: argparse.Namespace,
    wanted: Mapping[str, Sequence[str]],
    results: Results,
    target: Target,
) -> None:
    say = Progress()
    until = time.monotonic() + SHORT_MINUTES * 60.0 if arguments.short else float("inf")
    seed = arguments.seed or random.SystemRandom().randrange(1, 1 << 31)
    say(f"{settings.connector.name}: {len(wanted)} rows, {arguments.repeats} runs each, --seed {seed}")
    lab = Lab(settings, launcher, say, seed)
    target.environment = _environment(lab, settings)
    results.save()
    # Slow rows last in each round, so that a limit of time costs their runs first.
    rows = sorted((ROWS[name] for name in wanted), key=lambda row: row.is_slow)
    for number in range(1, arguments.repeats + 1):
        for row in rows:
            stages = wanted[row.name]
            if target.runs_of(row.name, stages or (AFTERWARDS,)) >= number or row.name in target.skipped:
                continue
            if time.monotonic() > until:
                say("the time is over")
                return
            _try_row(lab, row, stages, number, arguments.repeats, target, say)
            results.save()


def _try_row(
    lab: Lab, row: Row, stages: Sequence[str], number: int, of: int, target: Target, say: Progress
) -> None:
    """Run a row once, and look at the servers after it."""
    verdicts, why_not = run_once(lab, row, stages)
    lab.end_router()  # before servers are started again, and before the rows that have no router
    if why_not:
        target.skipped[row.name] = why_not
        say(f"{row.name}: not tried: {why_not}")
        return
    target.add(row.name, verdicts)
    told = ", ".join(
        f"{stage} {verdict.outcome}" + (f" ({verdict.why})" if verdict.outcome in BAD else "")
        for stage, verdict in verdicts.items()
    )
    say(f"{row.name} {number}/{of}: {told}")
    if any(each.outcome in (Outcome.DEAD, Outcome.LEAK, Outcome.HANG) for each in verdicts.values()):
        lab.heal()  # the next runs must not suffer from this one


def run_once(lab: Lab, row: Row, stages: Sequence[str]) -> tuple[dict[str, Verdict], str]:
    """Run a row once. Returns a verdict for each stage, or why the row makes no sense here."""
    if row.needs_params and not lab.settings.connector.takes_params:
        return {}, "the connector takes no kv_transfer_params"
    if row.name == "expired" and not lab.settings.connector.lease_s:
        return {}, "the connector has no lease"
    try:
        verdicts = row.run(lab, stages)
    except NotApplicableError as error:
        return {}, str(error)
    except OfferError as error:
        kind = Outcome.HANG if error.reply.is_late else Outcome.ERROR
        verdicts = {stage: Verdict(kind, f"the prefill server: {error}") for stage in stages}
    except (OSError, LaunchError) as error:
        verdicts = {stage: Verdict(Outcome.DEAD, str(error).splitlines()[0][:300]) for stage in stages}
    verdicts = {stage: verdict for stage, verdict in verdicts.items() if stage in stages}
    if row.has_afterwards:
        verdicts[AFTERWARDS] = judge_rest_of(lab)
    return verdicts, ""


@contextmanager
def _interruptible() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C, so that they leave no server behind either."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- what is told ------------------------------------------------------------------------------------


def _tell(results: Results, folder: Path) -> int:
    """Write and print the tables. Returns the exit status."""
    text = markdown(results.targets)
    (folder / "table.md").write_text(text)
    print(printable(text, keep="\n"))
    print(printable(f"results, tables and logs: {folder}"), file=sys.stderr)
    return int(any(target.bad for target in results.targets.values()))


def _environment(lab: Lab, settings: Settings) -> dict[str, str]:
    versions = {"kvferry": _version("kvferry")}
    try:
        versions["vLLM"] = str(json.loads(lab.decode.client.get("/version"))["version"])
    except (OSError, ValueError, KeyError):
        versions["vLLM"] = "unknown"
    for name in ("torch", "nixl", "nixl-cu12", "nixl-cu13", "lmcache", "mooncake-transfer-engine"):
        if found := _version(name):
            versions[name] = found
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    hardware = f"{about()['processor']}, {os.cpu_count()} cores, {memory:.0f} GB"
    if gpus := _gpus():
        hardware += f"; {gpus}"
    model = settings.model
    if settings.is_tiny:
        model = f"a random {'Idefics3' if settings.connector.encodes else 'Llama'} of 3 layers"
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "hardware": hardware,
        "model": f"{model}; logits within {settings.tolerance:g} are a near-tie",
        "policy": f"kv_load_failure_policy {settings.policy}; deadline {settings.deadline_s:g} s, lease "
        f"{settings.connector.lease_s:g} s",
        "system": f"Linux {platform.release()}, Python {platform.python_version()}",
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gpus() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30.0,
    )
    return ", ".join(done.stdout.split("\n")[:-1]) if done.returncode == 0 else ""
