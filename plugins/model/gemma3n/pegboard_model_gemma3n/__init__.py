"""Gemma 3n (Google 2025), the text model."""
