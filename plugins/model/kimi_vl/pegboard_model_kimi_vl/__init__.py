"""Kimi-VL."""
