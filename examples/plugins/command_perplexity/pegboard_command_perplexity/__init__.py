"""The command `perplexity`."""
