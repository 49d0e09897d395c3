"""The error of a command line that is wrong in itself."""

from __future__ import annotations

from pegboard.errors import ConfigError


class UsageError(ConfigError):
    """The command line itself is wrong."""
