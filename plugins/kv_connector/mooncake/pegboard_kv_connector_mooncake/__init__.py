"""The KV connector `mooncake`: engines read each other's KV blocks with Mooncake."""
