"""Run two vLLM servers behind a router, and a single one to compare them with."""
