"""Run one model over several worker processes.

Each has its own heads, its part of the pool, and a worker half of the connector.

    MultiProcessExecutor (executor.py)    in the scheduler's process: sends a step to all ranks, returns one
    result ├─ WorkerGroup (group.py)             starts the processes, waits for replies, notices dead
    processes, stops them ├─ steps.py                           reduces a step to what is new to the workers,
    and restores it in the worker └─ codec.py, channel.py, messages.py  the messages: frozen dataclasses as
    MessagePack over a socket pair

    worker.py                             the worker process
    └─ sharding.py                        which part of each weight a rank keeps

A worker never outlives the process that started it: it exits as soon as the other end of its socket pair
closes. If a worker ends, the engine ends, because the other workers cannot compute without it.
"""
