"""Start a node: read the options, bind the port, then import PyTorch and load the model."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

from ...connector.config import KVTransferConfig
from ...connector.factory import KVConnectorFactory
from ...router.http.launcher_link import open_link
from ...router.http.logs import set_up_logging
from ...router.http.serving import BrokenError, StartupError, bind, exit_status_of, place_of
from ...router.http.tracing import set_up_tracing
from ...transports.errors import KVTransferError
from .cli import NodeOptions, options_of, parse_arguments


def main(arguments: Sequence[str] | None = None, program: str = "kvferry serve") -> int:
    """Run a node until a signal stops it.

    Args:
        program: The program's name in messages.

    Returns:
        The exit status: 0 after a signal to stop, 1 if the engine could not continue or did not close, 2 if
        the node could not start with these options.
    """
    return exit_status_of(program, lambda: _run(parse_arguments(arguments, program)))


def run(arguments: argparse.Namespace, program: str) -> int:
    """Run a node with the options that a parser has read; see `main`."""
    return exit_status_of(program, lambda: _run(options_of(arguments)))


def _run(options: NodeOptions) -> None:
    # Several nodes may share a machine's cores, so an OpenMP thread that waits must not spin. Set this before
    # PyTorch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if options.settings.kv_transfer and options.settings.kv_transfer.kv_connector_module_path:
        # The command `kvferry` does not look for modules in the current folder. A connector of the user's own
        # may be there. At the end, so that no file of that folder replaces a module of Python or of a
        # library.
        sys.path.append(os.getcwd())
    set_up_logging(options.log_level, options.role, options.log_format)
    set_up_tracing(options.otlp_traces_endpoint, options.role)
    link = open_link()
    try:
        # Importing PyTorch takes seconds. Report a wrong option or a port in use before that.
        if options.settings.kv_transfer is not None:
            _check_connector(options.settings.kv_transfer)
        with bind(options.host, options.port) as listener:
            admin = {} if options.admin is None else {"admin": options.admin.port}
            link.report(**place_of(listener), **admin)
            from .lifecycle import serve

            asyncio.run(serve(options, listener, link))
    except (BrokenError, StartupError) as error:
        link.report(failed=str(error))
        raise
    finally:
        link.close()


def _check_connector(config: KVTransferConfig) -> None:
    """Raise `StartupError` unless the connector exists and takes its options."""
    try:
        KVConnectorFactory.check_options(config)
    except KVTransferError as error:
        raise StartupError(str(error)) from error
