"""The KV connector `offload`: KV blocks in host memory beside the KV cache."""
