"""Seed: tool calls as tags, reasoning between its own tags."""
