"""Nodes and routers as real processes, under a stream of requests, while faults befall them: all of it from a seed."""
