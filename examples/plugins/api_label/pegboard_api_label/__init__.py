"""The API `label`."""
