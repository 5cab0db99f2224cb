"""Try vLLM with kvferry on a machine with a GPU and without a network: `make test-gpu-vllm`."""
