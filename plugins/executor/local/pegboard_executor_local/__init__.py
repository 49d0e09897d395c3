"""Executors for one machine."""
