"""The engine process (E): schedules requests, accounts for KV blocks, steps the executor. Imports no torch.

Read in this order: engine.py (the loop) → scheduler.py → prefill.py → queues.py → kv/cache.py → kv/pool.py.
"""
