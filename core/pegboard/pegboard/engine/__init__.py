"""The engine process (E): it schedules requests, accounts for KV blocks and steps the executor. It
imports no torch.

Read in this order: engine.py (the loop) → steps.py → scheduler.py → admission.py → live_requests.py
→ kv/cache.py → kv/pool.py. What a request may wait for is a gate (gates.py), beside its feature.
"""
