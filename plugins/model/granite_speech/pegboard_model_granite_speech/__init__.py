"""Granite Speech."""
