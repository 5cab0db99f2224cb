"""How a command ends: its exit statuses, and the errors that lead to them."""

from __future__ import annotations

from typing import Final

#: Everything that was asked for works.
OK: Final = 0
#: Something that was asked for does not work.
FAILED: Final = 1
#: The command line or the configuration file is wrong. Nothing was done.
USAGE: Final = 2


class CommandError(Exception):
    """A command cannot do what it was asked for.

    Attributes:
        status: The exit status of the process.
    """

    status = FAILED


class UsageError(CommandError):
    """An option, an argument or a line of the configuration file is wrong. Nothing was done."""

    status = USAGE
