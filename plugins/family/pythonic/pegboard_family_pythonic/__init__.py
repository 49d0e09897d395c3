"""Tool calls as a Python list of calls."""
