"""Seed: tool calls as tags, reasoning between tags of its own."""
