"""Start a node: read the options, bind the port, then import PyTorch and load the model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..web.launcher_link import open_link
from ..web.serving import BrokenError, StartupError, bind, exit_status_of, set_up_logging
from .cli import parse_arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a node until a signal stops it.

    Returns:
        The exit status: 0 after a signal to stop, 1 if the engine could not continue or did not close, 2 if the node
        could not start with these options.
    """
    return exit_status_of("serve.py", lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> None:
    options = parse_arguments(arguments)
    set_up_logging(options.log_level, options.role)
    link = open_link(options.launcher_fd)
    try:
        with bind(options.host, options.port) as listener:
            admin = {} if options.admin is None else {"admin": options.admin.port}
            link.report(listening=listener.getsockname()[1], **admin)
            # Importing PyTorch takes seconds. Report a wrong option or a port in use before that.
            from .lifecycle import serve

            asyncio.run(serve(options, listener, link))
    except (BrokenError, StartupError) as error:
        link.report(failed=str(error))
        raise
    finally:
        link.close()
