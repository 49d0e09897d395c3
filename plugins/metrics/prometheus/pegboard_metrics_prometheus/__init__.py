"""Metrics for Prometheus: a sink that adds up samples, and a route that serves the totals."""
