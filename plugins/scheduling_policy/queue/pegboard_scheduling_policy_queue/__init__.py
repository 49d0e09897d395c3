"""Scheduling policies with one waiting queue: first come first served, and by priority."""
