"""Model sources for object storage."""
