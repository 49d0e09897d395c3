"""Paged attention in plain torch."""
