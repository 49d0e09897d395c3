"""Tools for plugin authors, and generators of the files that describe plugins."""
