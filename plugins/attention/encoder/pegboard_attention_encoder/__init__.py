"""Attention of encoders on CPUs."""
