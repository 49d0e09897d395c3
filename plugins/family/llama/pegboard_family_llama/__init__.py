"""Llama: tool calls as JSON objects or as a Python list."""
