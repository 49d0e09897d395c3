"""Scheduling policy: the waiting request with the fewest tokens goes first."""
