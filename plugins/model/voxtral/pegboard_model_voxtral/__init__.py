"""Voxtral."""
