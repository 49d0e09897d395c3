"""gpt-oss: attention with sinks, and experts."""
