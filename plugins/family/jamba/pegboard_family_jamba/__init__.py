"""Jamba: tool calls as a JSON list between tags."""
