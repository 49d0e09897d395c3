"""Paged attention on CPUs."""
