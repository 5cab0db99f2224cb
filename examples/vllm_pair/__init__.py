"""Two `vllm serve`, a router, and a single `vllm serve` to compare with."""
