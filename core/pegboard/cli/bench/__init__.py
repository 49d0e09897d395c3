"""`pegboard bench`: latency, throughput, a running server, start-up. Result fields have vLLM's names."""
