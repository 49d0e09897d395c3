"""Encoders: texts become vectors or classes."""
