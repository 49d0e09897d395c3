"""GigaChat: a tool call is a separate message."""
