"""A reference engine: continuous batching over a paged KV cache that a connector can hand to another node."""

import os

# Read once, when huggingface_hub is first imported, hence here: the engine never fetches anything.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
