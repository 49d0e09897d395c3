"""Paged attention with the library flash-attn."""
