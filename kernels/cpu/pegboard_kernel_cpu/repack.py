"""The files of the repack cache: weights in a packed layout, which are packed once and mapped into memory at every later start.

A weight class calls `open_packed` before it reads or decodes anything, and `store_packed` after it has packed the weight. Both
return the memory to compute with.

Each weight has one file below `<model cache>/repacked/<checkpoint>/`. Its name is a digest of everything that determines the
bytes, so a file is never out of date. A file is written under another name and then moved into place. The checksums in its header
show whether it is damaged; the weight is then packed again. When the limit is reached, the files that have been unused for
longest are deleted first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pegboard.interfaces.quantization import RepackCache, RepackEntry
from pegboard.log import get_logger

log = get_logger(__name__)

MAGIC = b"pegboard packed weight 1\n"
SUFFIX = ".packed"
PAGE = 4096
"""The bytes begin at a multiple of this, and each sum covers this number of them."""


@dataclass(frozen=True, slots=True)
class Packed:
    """memory: the bytes of a weight. Writing to them changes no file. If they are mapped from a file, they begin at a page
    border. facts: small JSON values that say how to read the bytes."""

    memory: memoryview
    facts: Mapping[str, Any]


def open_packed(entry: RepackEntry, layout: str) -> Packed | None:
    """Map the weight that `store_packed` kept under this layout. Returns None if there is none, or if its file is damaged.
    layout: names the arrangement of the bytes and everything that it depends on."""
    return _files_of(entry.cache).open(entry.key, layout)


def store_packed(entry: RepackEntry, layout: str, memory: memoryview, facts: Mapping[str, Any]) -> Packed:
    """Keep the bytes in a file and return them mapped from it, so that the caller can free its copy. If the file cannot be
    written, the returned memory is `memory` itself."""
    return _files_of(entry.cache).store(entry.key, layout, memory, facts)


def _files_of(cache: RepackCache) -> RepackFiles:
    """Return the files of this cache. All weights of an engine share them."""
    if not isinstance(cache.files, RepackFiles):
        cache.files = RepackFiles(cache.root, cache.digest, cache.limit_bytes)
    return cache.files


class RepackFiles:
    """root: the folder with the files of all checkpoints. digest: of this checkpoint. limit_bytes: of all files together,
    including those of other engines."""

    def __init__(self, root: Path, digest: str, limit_bytes: int) -> None:
        self.root, self.limit_bytes = root, limit_bytes
        self.folder = root / _name(digest)
        self.in_use: set[Path] = set()
        self._total: int | None = None
        self._can_write = True

    def open(self, entry_key: Sequence[object], layout: str) -> Packed | None:
        key, path = self._place(entry_key, layout)
        try:
            mapped = _map(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # it cannot be read, or is empty
            log.warning("%s cannot be mapped (%s); the weight is packed again", path, error)
            return None
        packed = _unpack(mapped, key)
        if packed is None:
            log.warning("%s is damaged; the weight is packed again", path)
            return None
        self.in_use.add(path)
        with contextlib.suppress(OSError):  # in a read-only folder the file keeps its old time
            os.utime(path)
        return packed

    def store(self, entry_key: Sequence[object], layout: str, memory: memoryview, facts: Mapping[str, Any]) -> Packed:
        key, path = self._place(entry_key, layout)
        memory = memory.cast("B")
        kept = Packed(memory, facts)
        if not self._write(path, _header(key, memory, facts), memory):
            return kept
        try:
            mapped = _map(path)
        except (OSError, ValueError):  # another engine has deleted it, because it needed the room
            return kept
        self.in_use.add(path)
        return _unpack(mapped, key) or kept

    def _place(self, entry_key: Sequence[object], layout: str) -> tuple[str, Path]:
        key = json.dumps([*entry_key, layout], sort_keys=True)
        return key, self.folder / (_name(key) + SUFFIX)

    def _write(self, path: Path, header: bytes, memory: memoryview) -> bool:
        """Write a file and move it into place. Returns False if that fails, and logs the reason once."""
        size = len(header) + len(memory)
        if not self._can_write or not self._make_room(size):
            return False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_file(path, header, memory)
        except OSError as error:
            log.info("packed weights are not kept in %s: %s", self.root, error)
            self._can_write = False
            return False
        self._total = (self._total or 0) + size
        return True

    def _make_room(self, size: int) -> bool:
        """Delete the files that have been unused for longest until `size` more bytes are within the limit. Returns whether they
        are."""
        if self._total is not None and self._total + size <= self.limit_bytes:
            return True
        found = []
        for file in self.root.glob(f"*/*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process has just deleted it
                stat = file.stat()
                found.append((stat.st_mtime_ns, stat.st_size, file))
        self._total = sum(length for _, length, _ in found)
        for _, length, file in sorted(found):
            if self._total + size <= self.limit_bytes:
                break
            if file not in self.in_use:
                with contextlib.suppress(OSError):  # it may belong to another user
                    file.unlink()
                    self._total -= length
        return self._total + size <= self.limit_bytes


def _name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _header(key: str, memory: memoryview, facts: Mapping[str, Any]) -> bytes:
    """Return MAGIC, one line of JSON, and zeros up to the page where the bytes begin."""
    content = {"key": key, "size": len(memory), "facts": dict(facts), "sums": _sums(key, memory, facts)}
    line = MAGIC + json.dumps(content).encode() + b"\n"
    return line + bytes(-len(line) % PAGE)


def _sums(key: str, memory: memoryview, facts: Mapping[str, Any]) -> str:
    """Return a digest of the key, the facts, the sum of each page's words, and the bytes after the last whole page. It runs at
    the speed of memory. A cryptographic digest of all bytes would delay a warm start."""
    whole = len(memory) // PAGE * PAGE
    pages = np.frombuffer(memory[:whole], "<u8").reshape(-1, PAGE // 8)
    digest = hashlib.sha256(json.dumps([key, dict(facts)], sort_keys=True).encode())
    digest.update(pages.sum(axis=1, dtype=np.uint64).tobytes())
    digest.update(memory[whole:])
    return digest.hexdigest()


def _unpack(mapped: mmap.mmap, key: str) -> Packed | None:
    """Return the weight in a file, or None if the file does not hold the complete and unchanged bytes of this key."""
    end = mapped.find(b"\n", len(MAGIC))
    if mapped[: len(MAGIC)] != MAGIC or end < 0:
        return None
    try:
        content = json.loads(mapped[len(MAGIC) : end])
        size, facts, sums = content["size"], content["facts"], content["sums"]
    except (ValueError, KeyError, TypeError):
        return None
    start = end + 1 + -(end + 1) % PAGE
    if not isinstance(facts, dict) or start + (size if isinstance(size, int) else -1) != len(mapped):
        return None
    memory = memoryview(mapped)[start:]
    return Packed(memory, facts) if _sums(key, memory, facts) == sums else None


def _map(path: Path) -> mmap.mmap:
    """Map a file as private memory, so a reload of the weights can write over it without changing the file."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_WILLNEED"):
        mapped.madvise(mmap.MADV_WILLNEED)
    return mapped


def _write_file(path: Path, header: bytes, memory: memoryview) -> None:
    """Write a file that appears under `path` only when it is complete. It is not flushed to the disk: if a power failure damages
    it, the checksums show that."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
    try:
        with os.fdopen(number, "wb") as file:
            file.write(header)
            file.write(memory)
            os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
