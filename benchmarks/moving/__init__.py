"""Bytes moved between two processes by many means, one beside the other: what `benchmarks/transports.py` is made of."""
