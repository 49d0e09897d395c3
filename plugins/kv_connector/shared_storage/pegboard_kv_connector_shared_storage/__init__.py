"""The KV connector `shared_storage`: KV blocks as files in a folder."""
