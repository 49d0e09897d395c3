"""Tool calls in tags that carry the name of the function."""
