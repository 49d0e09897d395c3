"""Granite: tool calls as JSON behind a marker, reasoning between sentences."""
