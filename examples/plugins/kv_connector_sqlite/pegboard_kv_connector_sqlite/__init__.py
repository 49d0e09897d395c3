"""A KV connector that stores blocks in SQLite."""
