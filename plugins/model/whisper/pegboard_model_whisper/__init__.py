"""Whisper for Pegboard: writes down what is said."""

__version__ = "0.1.0"
