"""The options of `kvferry prove`."""

from __future__ import annotations

import argparse

from .presets import PRESETS, SERVERS
from .rows import ROWS

DESCRIPTION = """\
Start a pair of vLLM servers with any KV connector, try faults at every stage of a handoff, and compare every answer with a
single server's. Print a table of what happened.

It needs vLLM in this environment, and no GPU. It starts three servers; with --model tiny, the default, each takes about 1 GB.
Ctrl-C ends all of them and prints what is complete. A later call with the same --out goes on from there.
"""
EPILOG = f"""\
connectors:
{chr(10).join(f"  {each.name:16} {each.about}" for each in PRESETS.values())}

rows:
{chr(10).join(f"  {row.name:22} {row.about}" for row in ROWS.values())}

examples:
  kvferry prove --short                                   kvferry over shared memory, in ten minutes
  kvferry prove --preset nixl --only kill-prefill         one row
  kvferry prove --only kill-prefill/loading --repeats 50  one cell
  kvferry prove --model ~/models/qwen --dtype bfloat16 --serve-args '--gpu-memory-utilization 0.3' \\
      --env prefill:CUDA_VISIBLE_DEVICES=0 decode:CUDA_VISIBLE_DEVICES=1 alone:CUDA_VISIBLE_DEVICES=2
  kvferry prove --transfer-config @mine.json --lease-s 30 another connector
  kvferry prove --preset nixl --url prefill=http://a:8000 decode=http://b:8000 alone=http://c:8000

exit status: 0 if no cell has wrong tokens, a hang, a dead server or a leak; 1 if one has; 2 if the command line is wrong.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    what = parser.add_argument_group("what is tried")
    what.add_argument(
        "--preset",
        default="shm",
        metavar="NAME",
        help=f"connector: {', '.join(PRESETS)} (default: %(default)s)",
    )
    what.add_argument(
        "--transfer-config",
        default="",
        metavar="JSON",
        help="another connector: vLLM's --kv-transfer-config or --ec-transfer-config as JSON, or @FILE; "
        "{side}, {port} and {folder} are replaced by the "
        "name of the server, a port that it keeps, and a folder that all share",
    )
    what.add_argument(
        "--lease-s",
        type=float,
        metavar="S",
        help="seconds after which the prefill server gives up blocks that were not fetched (default: the preset's; 30 with "
        "--transfer-config)",
    )
    what.add_argument(
        "--no-params",
        action="store_true",
        help="the connector needs no kv_transfer_params: the decode server finds caches by the prompt",
    )
    what.add_argument(
        "--policy",
        choices=("fail", "recompute"),
        default="fail",
        help="vLLM's kv_load_failure_policy (default: %(default)s)",
    )
    what.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="ROW[/STAGE]",
        help="only these rows or cells (default: all)",
    )
    how = parser.add_argument_group("how often")
    how.add_argument(
        "--repeats", type=int, default=20, metavar="N", help="runs of each cell (default: %(default)s)"
    )
    how.add_argument(
        "--short",
        action="store_true",
        help="as --repeats 5, and begin nothing new after 10 minutes; slow rows come last and are tried less often",
    )
    how.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="decides prompts, forged values and moments (default: random)",
    )
    how.add_argument(
        "--deadline-s",
        type=float,
        default=40.0,
        metavar="S",
        help="an answer that takes longer is a hang, in seconds (default: %(default)s)",
    )
    servers = parser.add_argument_group("servers")
    servers.add_argument(
        "--model",
        default="tiny",
        help="folder or name; tiny is a random one that is written (default: %(default)s)",
    )
    servers.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="the servers' dtype, which decides what is a near-tie (default: %(default)s)",
    )
    servers.add_argument(
        "--serve-args", default="", metavar="ARGS", help="further arguments of every server, in quotes"
    )
    servers.add_argument(
        "--env",
        nargs="+",
        default=[],
        metavar="[SIDE:]NAME=VALUE",
        help=f"variables for the server of a SIDE ({', '.join(SERVERS)}), or for all of them",
    )
    servers.add_argument(
        "--url",
        nargs="+",
        default=[],
        metavar="SIDE=URL",
        help="use these servers, which run already; rows that need their processes are left out; router=URL: a router or proxy "
        "in front of the pair (default: start kvferry router)",
    )
    out = parser.add_argument_group("results")
    out.add_argument(
        "--out",
        default="kvferry-prove",
        metavar="FOLDER",
        help="results.json, table.md and logs; runs that are there are kept (default: %(default)s)",
    )
