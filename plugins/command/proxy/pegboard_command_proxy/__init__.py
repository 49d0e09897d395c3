"""The command `proxy`: one address for several servers."""
