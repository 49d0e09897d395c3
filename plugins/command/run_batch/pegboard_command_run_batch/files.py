"""The files of a batch: a local file, or a URL if the user has allowed URLs."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from pegboard.errors import PegboardError, UsageError

TIMEOUT_S = 60.0


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def check_allowed(text: str, flag: str, allowed: bool) -> None:
    """Check that a URL is allowed and that its scheme is known. Raises UsageError."""
    if is_url(text) and not allowed:
        raise UsageError(f"{flag} {text}: URLs are read and written only with --allow-urls")
    if "://" in text and not is_url(text):
        raise UsageError(f"{flag} {text}: expected a path, or http:// or https://")


@contextlib.contextmanager
def opened_input(source: str) -> Iterator[Path]:
    """Yields a local file with the content of `source`. Raises PegboardError."""
    if not is_url(source):
        path = Path(source).expanduser()
        if not path.is_file():
            raise PegboardError(f"--input-file {source}: there is no such file")
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="pegboard-batch-") as copy:
        try:
            with urllib.request.urlopen(source, timeout=TIMEOUT_S) as response:
                shutil.copyfileobj(response, copy)
        except (OSError, urllib.error.URLError) as error:
            raise PegboardError(f"--input-file {source}: {error}") from error
        copy.flush()
        yield Path(copy.name)


@contextlib.contextmanager
def opened_output(target: str, folder: str | None) -> Iterator[IO[str]]:
    """Yields a file to write. When the block ends without an error, its content becomes `target`.
    For a path, the file has another name in the same folder and is then renamed. For a URL, the
    file is in `folder` (default: the system's folder for temporary files) and is sent with PUT.
    Raises PegboardError."""
    if is_url(target):
        with tempfile.NamedTemporaryFile(
            "w+", prefix="pegboard-batch-", suffix=".jsonl", dir=folder, encoding="utf-8"
        ) as file:
            yield file
            file.flush()
            _upload(target, Path(file.name))
        return
    path = Path(target).expanduser()
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as file:
            yield file
        part.replace(path)
    except OSError as error:
        raise PegboardError(f"--output-file {target}: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _upload(target: str, path: Path) -> None:
    request = urllib.request.Request(
        target, data=path.read_bytes(), method="PUT", headers={"Content-Type": "application/jsonl"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            pass
    except (OSError, urllib.error.URLError) as error:
        raise PegboardError(f"--output-file {target}: {error}") from error
