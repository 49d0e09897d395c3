"""Step: tool calls as tags between special tokens, reasoning up to an end tag."""
