"""Olmo: tool calls as Python lines between tags, reasoning between think tags."""
