"""The KV cache: block tables, the pool of blocks, retention rules, block hashes."""
