"""Carries the KV cache of a request from the node that prefilled it to the node that decodes it.

`kvferry.transports` moves bytes, `kvferry.connector` decides which, `kvferry.runner_mixin` connects it to a
model runner.
"""

#: The version of the distribution. `pyproject.toml` reads it here.
__version__ = "0.1.0.dev0"
