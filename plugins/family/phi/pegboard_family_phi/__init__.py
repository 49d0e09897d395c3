"""Phi: tool calls as a JSON list behind a marker."""
