"""Phi: tool calls as a JSON list after a marker."""
