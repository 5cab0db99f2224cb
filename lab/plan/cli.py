"""The options of `kvferry plan`."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...router.http.access import NODE_KEY_VARIABLE
from .search import WAYS

DESCRIPTION = """\
Say how many nodes a load needs, and how to use them: plain nodes behind a load balancer, prefill and decode nodes, or kvferry's
router, which decides for each request.

First measure what work costs at one of your nodes, and what handing a cache over to another one costs. The nodes must run and
have nothing else to do. Then fleets are simulated, from those costs and a trace of your requests.
"""
EPILOG = f"""\
ways:
{chr(10).join(f"  {name:8} {about}" for name, about in WAYS.items())}

a trace has one JSON object per line, in the order of arrival:
  {{"timestamp": 1042, "input_length": 3180, "output_length": 8, "hash_ids": [0, 7]}}
timestamp is in ms, the lengths are in tokens. hash_ids may be left out: one number per 512 tokens of the prompt, equal ones for
equal beginnings.

examples:
  kvferry plan --measure http://a:8000 http://b:8000 --costs node.json
  kvferry plan --costs node.json --trace requests.jsonl --ttft-limit-ms 1000 --itl-limit-ms 50
  kvferry plan --costs node.json --trace requests.jsonl --rate 2 --plot plan.svg

exit status: 0 if a number of nodes keeps the limits or none was asked for; 1 if none does, or a node cannot be measured; 2 if the
command line is wrong.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    costs = parser.add_argument_group("what work costs")
    costs.add_argument(
        "--costs",
        type=Path,
        metavar="FILE",
        help="costs of a node, as JSON; --measure writes it (default: those of a small model on one core of a CPU)",
    )
    costs.add_argument(
        "--measure",
        nargs="+",
        default=[],
        metavar="URL",
        help="measure this node, and handing over to a second one; takes a minute or two",
    )
    costs.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=2048,
        metavar="N",
        help="with --measure: tokens of a step, as the node was started with (default: %(default)s)",
    )
    costs.add_argument(
        "--max-num-seqs",
        type=int,
        default=256,
        metavar="N",
        help="with --measure: requests of a step, as the node was started with (default: %(default)s)",
    )
    costs.add_argument(
        "--insecure-http",
        action="store_true",
        help=f"with --measure: send the key of {NODE_KEY_VARIABLE} to nodes beyond loopback over plain HTTP, too",
    )
    # Files are for routers. Here the key is that of the variable, and the CAs are those of the system.
    parser.set_defaults(node_certfile="", node_keyfile="", node_api_key_file="", node_ca_certs="")
    load = parser.add_argument_group("the load")
    load.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="requests of the load, of which the first 2,000 count (default: nothing is simulated)",
    )
    load.add_argument(
        "--rate",
        type=float,
        default=1.0,
        metavar="X",
        help="factor by which requests arrive faster than in the trace (default: %(default)g)",
    )
    limits = parser.add_argument_group("what is to be kept")
    limits.add_argument(
        "--ttft-limit-ms",
        type=float,
        default=2000.0,
        metavar="MS",
        help="milliseconds until the first token (default: %(default)g)",
    )
    limits.add_argument(
        "--itl-limit-ms",
        type=float,
        default=100.0,
        metavar="MS",
        help="milliseconds between two tokens of a request, on average (default: %(default)g)",
    )
    limits.add_argument(
        "--share",
        type=float,
        default=0.95,
        metavar="X",
        help="share of the requests that must keep both limits (default: %(default)g)",
    )
    how = parser.add_argument_group("what is tried and printed")
    how.add_argument(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=list(WAYS),
        metavar="WAY",
        help=f"ways to use the nodes: {', '.join(WAYS)} (default: all)",
    )
    how.add_argument(
        "--plot", type=Path, metavar="FILE", help="write goodput by number of nodes and way, as SVG"
    )
    how.add_argument("--json", action="store_true", help="print JSON instead of a table")
