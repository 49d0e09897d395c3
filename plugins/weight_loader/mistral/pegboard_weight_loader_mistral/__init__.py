"""Checkpoints in Mistral's own format."""
