"""The KV connector `lmcache`: KV blocks are kept by LMCache."""
