"""DeepSeek: tool calls between special tokens or as tags, reasoning between think tags."""
