"""Two vLLM servers with kvferry between them, and the router in front: `python examples/vllm_pair.py MODEL`.

The router asks both servers at once: the first computes the prompt, and the second answers with the first
one's KV cache. `CUDA_VISIBLE_DEVICES` is not set here, so on one GPU give each server a part:
`--gpu-memory-utilization 0.4`.
"""

import json
import re
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack

PREFILL, DECODE, ROUTER = 8100, 8200, 8000
KVFERRY = {
    "kv_connector": "KvferryConnector",
    "kv_connector_module_path": "kvferry.connector.vllm",
    "kv_role": "kv_both",
}
START_S = 600


def ask(port: int, path: str, body: dict[str, object] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    url, headers = f"http://127.0.0.1:{port}{path}", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def main(model: str, *options: str) -> None:
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *options]
    server += ["--kv-transfer-config", json.dumps(KVFERRY)]
    urls = [f"--{role}=http://127.0.0.1:{port}" for role, port in (("prefill", PREFILL), ("decode", DECODE))]
    commands = [
        [*server, f"--port={PREFILL}"],
        [*server, f"--port={DECODE}"],
        [sys.executable, "-m", "kvferry", "router", f"--port={ROUTER}", "--dev", *urls],
    ]
    with ExitStack() as stack:
        processes = [stack.enter_context(subprocess.Popen(each)) for each in commands]
        for process in processes:
            stack.callback(process.terminate)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and all(process.poll() is None for process in processes):
            try:
                ask(ROUTER, "/ready")
                break
            except OSError:
                time.sleep(1)  # the servers load their model
        else:
            sys.exit("a server did not start; its log is above")
        prompt = "A ferry carries people and goods across the water, and comes back for more. " * 8
        asked = {"model": model, "prompt": prompt, "max_tokens": 16}
        answer = json.loads(ask(ROUTER, "/v1/completions", asked))
        print(answer["choices"][0]["text"])
        (moved,) = re.findall(r"^kvferry_load_bytes_sum.* (.*)$", ask(DECODE, "/metrics"), re.MULTILINE)
        print(f"{float(moved):,.0f} bytes of its KV cache came from the first server")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python examples/vllm_pair.py MODEL [OPTIONS OF VLLM]")
    main(*sys.argv[1:])
