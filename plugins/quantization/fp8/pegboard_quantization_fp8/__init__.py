"""Weights in 8-bit floats."""
