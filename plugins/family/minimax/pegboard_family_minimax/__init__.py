"""MiniMax: tool calls as JSON or as tags, reasoning between think tags."""
