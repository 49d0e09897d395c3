"""Examines an installation: its plugins, the machine, and whether a model runs. Import from the
submodules."""
