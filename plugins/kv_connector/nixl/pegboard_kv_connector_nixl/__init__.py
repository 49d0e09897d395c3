"""The KV connector `nixl`: engines read each other's KV blocks with NIXL."""
