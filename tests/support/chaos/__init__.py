"""A soak: real nodes and routers serve a stream of requests while faults are injected, all drawn from
a seed.
"""
