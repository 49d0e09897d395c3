"""InternLM: tool calls as JSON between action tokens."""
