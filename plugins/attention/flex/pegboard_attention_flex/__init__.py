"""Paged attention with torch's flex_attention."""
