"""Granite: tool calls as JSON after a marker, reasoning between two fixed sentences."""
