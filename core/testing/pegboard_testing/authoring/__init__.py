"""Tools for people who write plugins, and generators of the files that describe them."""
