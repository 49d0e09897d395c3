"""Checkpoints of CoreWeave's tensorizer."""
