"""Weights in micro-scaled floats (OCP MX)."""
