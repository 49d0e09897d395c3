"""ERNIE: tool calls as JSON between tags, reasoning and response between tags."""
