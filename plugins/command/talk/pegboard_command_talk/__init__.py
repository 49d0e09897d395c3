"""The commands `chat` and `complete`: talk to a running server."""
