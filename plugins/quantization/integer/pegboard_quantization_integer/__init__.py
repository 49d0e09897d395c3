"""Weights that a checkpoint stores in plain types."""
