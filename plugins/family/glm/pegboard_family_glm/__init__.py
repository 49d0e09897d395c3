"""GLM: tool calls as tags, reasoning between think tags."""
