"""GigaChat: a tool call as a message of its own."""
