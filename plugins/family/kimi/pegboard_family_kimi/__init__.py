"""Kimi: tool calls between special tokens, reasoning between think tags."""
