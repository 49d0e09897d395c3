"""Metrics for Prometheus: a sink that adds samples up, and the route that shows the sums."""
