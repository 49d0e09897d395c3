"""Collectives of torch."""
