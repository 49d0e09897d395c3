"""Traces for OpenTelemetry: one span per request."""
