"""One model over several worker processes: each has its layers and heads, its share of the pool, and a worker half of the
connector.

    MultiProcessExecutor (executor.py)    in the scheduler's process: one step to all ranks, one result back
    ├─ WorkerGroup (group.py)             starts the processes, waits for them, notices their end, ends them
    ├─ steps.py                           a step without what the workers know already, and back
    └─ codec.py, channel.py, messages.py  what crosses: frozen dataclasses as MessagePack over a socket pair

    worker.py                             the worker process
    ├─ stages.py                          which layers a rank runs, and how the tokens get from stage to stage
    └─ sharding.py                        which part of which weight of these layers it keeps

A worker never outlives the process that started it: it ends when its end of the socket pair says so. A worker that
is gone ends the engine, since the others cannot compute without it.
"""
