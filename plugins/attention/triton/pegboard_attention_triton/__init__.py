"""Paged attention on GPUs."""
