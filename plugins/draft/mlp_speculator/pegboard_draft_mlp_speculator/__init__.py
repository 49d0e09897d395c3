"""Draft plugin `mlp_speculator`: proposes tokens with a small feed-forward network."""
