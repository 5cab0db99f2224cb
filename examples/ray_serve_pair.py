"""A prefill deployment and a decode deployment of Ray Serve, with kvferry between them.

    python examples/ray_serve_pair.py --model MODEL [--prefills N] [--decodes N]
    python examples/ray_serve_pair.py --demo --device cpu

It starts Ray on this machine, or joins the cluster that `RAY_ADDRESS` names, and serves OpenAI's API until it
is stopped. With `--demo` it also deploys one engine without kvferry, asks both the same, shows that they
answer the same, and ends. docs/behind-a-router.md says what to install and what works.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
import urllib.request
from typing import Any

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app, build_pd_openai_app

from kvferry.connector.ray import register
from kvferry.lab.engine.default_model import default_model_folder

KVFERRY = {
    "kv_connector": "KvferryConnector",
    "kv_connector_module_path": "kvferry.connector.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
#: Several engines share the cores of one machine.
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_USE_AOT_COMPILE": "0",
    "TORCHDYNAMO_DISABLE": "1",
}
#: Ray counts a processor for each of controller, proxy, ingresses and engines, which share those of a small
#: machine.
DEMO_CPUS = 16


def config_of(
    options: argparse.Namespace, num_replicas: int = 1, *, is_pair: bool = True, resource: str = ""
) -> LLMConfig:
    """Return the configuration of one deployment.

    Args:
        resource: Its replicas run on machines that have this resource of Ray. Empty: on any.
    """
    engine: dict[str, Any] = {
        "max_model_len": options.max_model_len,
        "max_num_batched_tokens": options.max_num_batched_tokens,
    }
    if is_pair:
        extra = {"transport": options.transport}
        engine["kv_transfer_config"] = {**KVFERRY, "kv_connector_extra_config": extra}
    more: dict[str, Any] = {}
    if options.device == "cpu":
        engine |= {"dtype": "float32", "block_size": 32, "enforce_eager": True}
        more = {"accelerator_config": {"kind": "cpu"}, "runtime_env": {"env_vars": CPU_ENVIRONMENT}}
    return LLMConfig(
        model_loading_config={"model_id": "model", "model_source": options.model},
        deployment_config={"num_replicas": num_replicas},
        engine_kwargs=engine,
        placement_group_config={"bundles": [{"CPU": 1, resource: 1}]} if resource else None,
        **more,
    )


def deploy_pair(
    options: argparse.Namespace, num_prefills: int, num_decodes: int, *, decode_resource: str = ""
) -> None:
    """Deploy the pair at `/pair`, or change its numbers of replicas, and wait until it is so."""
    configs = {
        "prefill_config": config_of(options, num_prefills),
        "decode_config": config_of(options, num_decodes, resource=decode_resource),
    }
    serve.run(build_pd_openai_app(configs), name="pair", route_prefix="/pair")


def deploy_alone(options: argparse.Namespace) -> None:
    """Deploy one engine without kvferry at `/alone`."""
    app = build_openai_app({"llm_configs": [config_of(options, is_pair=False)]})
    serve.run(app, name="alone", route_prefix="/alone")


def ask(url: str, prompt: str, max_tokens: int, timeout_s: float = 300.0, **fields: Any) -> str:
    """Return the greedy answer of an application.

    Raises:
        urllib.error.HTTPError: It has refused the request.
    """
    body = {"model": "model", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        (choice,) = json.loads(response.read())["choices"]
    return str(choice["text"])


def demonstrate(url: str) -> bool:
    """Ask both applications the same, and return whether they have answered the same."""
    all_equal = True
    for number, num_repeats in enumerate((4, 20, 40), 1):
        prompt = (
            f"Note {number}. The ferry carries what was packed, and does not open the boxes. " * num_repeats
        )
        answers, times = [], []
        for app in ("pair", "alone"):
            began = time.monotonic()
            answers.append(ask(f"{url}/{app}", prompt, 12))
            times.append(time.monotonic() - began)
        is_equal = answers[0] == answers[1]
        all_equal &= is_equal
        how = (
            "in turn: the first handoff between two replicas"
            if number == 1
            else "both replicas asked at once"
        )
        print(
            f"prompt {number}: {'same' if is_equal else 'OTHER'} answer, pair {times[0]:.2f} s, alone {times[1]:.2f} s; {how}"
        )
        print(f"  {answers[0]!r}" + ("" if is_equal else f"\n  {answers[1]!r}"))
    return all_equal


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder or a name (default: kvferry's default model)")
    parser.add_argument("--prefills", type=int, default=1, help="prefill replicas (default: %(default)s)")
    parser.add_argument("--decodes", type=int, default=1, help="decode replicas (default: %(default)s)")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="where vLLM computes (default: %(default)s)"
    )
    parser.add_argument(
        "--transport",
        default="shm",
        help="what moves the cache; shm within one machine (default: %(default)s)",
    )
    parser.add_argument("--max-model-len", type=int, default=2048, help="tokens (default: %(default)s)")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=256, help="tokens per step (default: %(default)s)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port of the API (default: %(default)s)")
    parser.add_argument("--demo", action="store_true", help="compare with one engine, and end")
    return parser


def main() -> int:
    options = make_parser().parse_args()
    options.model = options.model or str(default_model_folder())
    ray.init(num_cpus=DEMO_CPUS if options.demo and "RAY_ADDRESS" not in os.environ else None)
    try:
        register()
        serve.start(http_options={"host": "127.0.0.1", "port": options.port})
        deploy_pair(options, options.prefills, options.decodes)
        url = f"http://127.0.0.1:{options.port}"
        if options.demo:
            deploy_alone(options)
            return 0 if demonstrate(url) else 1
        print(f"ready on {url}/pair/v1", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
        return 0
    finally:
        serve.shutdown()


if __name__ == "__main__":
    raise SystemExit(main())
