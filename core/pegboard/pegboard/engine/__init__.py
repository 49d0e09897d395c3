"""The engine process (E): it schedules requests, accounts for KV blocks and steps the executor. It
imports no torch.

Read in this order: engine.py (the loop) → scheduler.py → prefill.py → queues.py → kv/cache.py →
kv/pool.py.
"""
