"""Ultravox."""
