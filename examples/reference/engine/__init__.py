"""A reference engine: continuous batching over a paged KV cache that a connector can hand to another node.

    Engine (engine.py)              asyncio on one side, the step thread on the other
    └─ EngineCore (core.py)         requests in, outputs out, one step after the other
       ├─ Scheduler (scheduler.py)  which tokens next; blocks from KVCacheManager
       │  └─ Handoffs               the scheduler half of the connector
       ├─ Executor (executor.py)    runs the steps: in this process, or in several that each have a part (parallel/)
       │  └─ ModelRunner (runner.py)   the worker half of the connector, around one step of the model
       │     ├─ InputBatch (batch.py)  tokens and block tables, kept from step to step
       │     └─ attention.py           paged attention under transformers' attention interface
       └─ Answer (answers.py)       tokens to text, stop texts, where an answer ends

`assembly.py` makes the parts from `EngineSettings`; `types.py` has what goes in and comes out.
"""

import os

# The engine never downloads anything. huggingface_hub reads this when it is first imported, so it is set here.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
