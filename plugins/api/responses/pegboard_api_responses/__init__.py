"""OpenAI's Responses API. Input and output are items, and responses are stored for the next
turn."""
