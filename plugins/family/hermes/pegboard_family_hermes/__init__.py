"""Hermes: tool calls as JSON between tags."""
