"""A reference engine: continuous batching over a paged KV cache that a connector can hand to another node."""
