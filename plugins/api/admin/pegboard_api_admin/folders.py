"""The folders of this machine that clients may name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def resolved(directories: Sequence[Path] | None) -> list[Path] | None:
    """Return the folders of an option; None = any folder."""
    return directories and [path.expanduser().resolve() for path in directories]


def named(text: str, directories: Sequence[Path] | None) -> Path | None:
    """Return the path, if it exists and is below one of these folders. Whether another path exists
    is not told."""
    try:
        path = Path(text).expanduser().resolve()
        allowed = directories is None or any(path.is_relative_to(folder) for folder in directories)
        return path if allowed and path.exists() else None
    except (OSError, ValueError, RuntimeError):
        # a name that no file can have, a loop of links, an unknown home
        return None
