"""Ternary weights."""
