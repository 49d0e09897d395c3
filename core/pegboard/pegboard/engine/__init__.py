"""The engine process (E): schedules requests, accounts for KV blocks, steps the executor. Imports no torch.

Read in this order: engine.py (the loop) → scheduler.py → admission.py → outcome.py → roster.py → kv_cache.py → block_pool.py.
"""
