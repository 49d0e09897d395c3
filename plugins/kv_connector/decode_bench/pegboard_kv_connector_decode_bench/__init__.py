"""The KV connector `decode_bench`: made-up KV blocks instead of a prefill."""
