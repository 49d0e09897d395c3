"""Holo: reasoning between think tags."""
