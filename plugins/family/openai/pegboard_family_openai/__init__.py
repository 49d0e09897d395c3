"""gpt-oss: reasoning, answers and tool calls as messages of the harmony format."""
