"""Built-in tools from MCP servers that the operator lists."""
