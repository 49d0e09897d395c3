"""A Llama that sees the mean colours of an image."""
