"""A reference engine: continuous batching over a paged KV cache that a connector can hand to another node.

    Engine (engine.py)              connects asyncio clients to the thread that runs the steps
    └─ EngineCore (core.py)         takes requests and returns outputs, step by step
       ├─ Scheduler (scheduler.py)  chooses the next tokens; takes blocks from KVCacheManager
       │  └─ Handoffs               the scheduler half of the connector
       ├─ Executor (executor.py)    runs the steps in this process, or in several that share the model
       (parallel/) │  └─ ModelRunner (runner.py)   the worker half of the connector, around one step of the
       model │     ├─ InputBatch (batch.py)  tokens and block tables, kept from step to step │     └─
       attention.py           paged attention under transformers' attention interface └─ Answer (answers.py)
       tokens to text, stop texts, end of the answer

`assembly.py` makes the parts from `EngineSettings`. `types.py` has the types of requests and outputs.
"""

import os

# The engine never downloads anything. huggingface_hub reads this only when it is first imported, so set it
# here.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
