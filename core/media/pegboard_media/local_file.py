"""Files of this machine, all below one folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pegboard_media.limits import MAX_BYTES, MAX_URL_CHARS, Unusable


def read_local(url: str, folder: str | None) -> bytes:
    """Return what the file of a file: URL holds. It must be a regular file below `folder` after
    its symbolic links are followed. None = no file may be read. There is one message for all that
    is refused, so that nobody learns which files exist."""
    if folder is None:
        raise Unusable(
            "is a local file, which this server does not read; use a data: URL, or start the "
            "server with --allowed-local-media-path"
        )
    try:
        descriptor = open_below(Path(folder).resolve(strict=True), path_of(url))
        with open(descriptor, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise Unusable("is not a file that this server may read") from error
    if len(content) > MAX_BYTES:
        raise Unusable(f"is larger than {MAX_BYTES} bytes")
    return content


def path_of(url: str) -> Path:
    """Return the path of a file: URL."""
    parts = urlsplit(url)
    path = Path(unquote(parts.path, errors="strict"))
    if len(url) > MAX_URL_CHARS or parts.netloc not in ("", "localhost") or not path.is_absolute():
        raise ValueError("not a local absolute path")
    return path


def open_below(root: Path, path: Path) -> int:
    """Return the descriptor of a regular file below `root`. The path is resolved and then walked
    folder by folder without following links, so a link that is put there later is not followed."""
    names = path.resolve(strict=True).relative_to(root).parts
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in names[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            inner = os.open(name, flags, dir_fd=folder)
            os.close(folder)
            folder = inner
        # a pipe would wait for a writer
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(names[-1] if names else ".", flags, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("not a regular file")
    return descriptor
