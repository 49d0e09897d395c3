"""Metrics sink: one JSON line per sample, appended to a file."""
