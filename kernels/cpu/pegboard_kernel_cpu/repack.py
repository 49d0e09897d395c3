"""The files of the repack cache: weights in a packed layout, which are packed once and mapped into
memory at every later start.

A weight class calls `open_packed` before it reads or decodes anything, and `store_packed` after it
has packed the weight. Both return the memory to compute with.

Each weight has one file below `<model cache>/repacked/<checkpoint>/`. Its name is a digest of
everything that determines the bytes, so a file is never out of date. A file is written under
another name and then moved into place. The checksums of its header and of its bytes show whether it
is damaged; the weight is then packed again. Files that other users may have changed are not read
(see cache_files). If the folder cannot be written, the engine runs without the files. When the
limit is reached, the files that have been unused for longest are deleted first.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pegboard.interfaces.quantization import RepackCache, RepackEntry
from pegboard.log import get_logger
from pegboard_kernel_cpu.cache_files import (
    explain,
    make_folder,
    open_trusted,
    sweep,
    warn_once,
    write_file,
)

log = get_logger(__name__)

MAGIC = b"pegboard packed weight 2\n"
SUFFIX = ".packed"
PAGE = 4096
"""The bytes begin at a multiple of this, and each sum covers this number of them."""

_HEAD = struct.Struct(f"<{len(MAGIC)}sI32s")
"""MAGIC, the number of bytes of the JSON text that follows, and the SHA-256 of that text. Damaged
JSON is never parsed."""

_MOST_HEADER_BYTES = 1 << 20

_FACTORS = np.frombuffer(
    b"".join(hashlib.sha256(b"%d" % i).digest() for i in range(PAGE // 16)), "<u8"
) | np.uint64(1)
"""Fixed random odd numbers, one for each 32-bit word of a page."""


@dataclass(frozen=True, slots=True)
class Packed:
    """memory: the bytes of a weight. Writing to them changes no file. If they are mapped from a
    file, they begin at a page border. facts: small JSON values that say how to read the bytes."""

    memory: memoryview
    facts: Mapping[str, Any]


def open_packed(entry: RepackEntry, layout: str) -> Packed | None:
    """Map the weight that `store_packed` kept under this layout. Returns None if there is none, or
    if its file is damaged. layout: names the arrangement of the bytes and everything that it
    depends on."""
    return _files_of(entry.cache).open(entry.key, layout)


def store_packed(
    entry: RepackEntry, layout: str, memory: memoryview, facts: Mapping[str, Any]
) -> Packed:
    """Keep the bytes in a file and return them mapped from it, so that the caller can free its
    copy. If the file cannot be written, the returned memory is `memory` itself."""
    return _files_of(entry.cache).store(entry.key, layout, memory, facts)


def _files_of(cache: RepackCache) -> RepackFiles:
    """Return the files of this cache. All weights of an engine share them."""
    if not isinstance(cache.files, RepackFiles):
        cache.files = RepackFiles(cache.root, cache.digest, cache.limit_bytes)
    return cache.files


class RepackFiles:
    """root: the folder with the files of all checkpoints. digest: of this checkpoint. limit_bytes:
    of all files together, including those of other engines."""

    def __init__(self, root: Path, digest: str, limit_bytes: int) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self.folder = root / _name(digest)
        self.in_use: set[Path] = set()
        self._total: int | None = None
        self._can_write = True
        self._is_ready = False

    def open(self, entry_key: Sequence[object], layout: str) -> Packed | None:
        key, path = self._place(entry_key, layout)
        try:
            mapped = _map(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except PermissionError as error:  # probably of all files in the folder
            warn_once(f"packed weights in {path.parent} are not used: {explain(error)}")
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

    def store(
        self, entry_key: Sequence[object], layout: str, memory: memoryview, facts: Mapping[str, Any]
    ) -> Packed:
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
        key = json.dumps([*entry_key, layout, MAGIC.decode()], sort_keys=True)
        return key, self.folder / (_name(key) + SUFFIX)

    def _write(self, path: Path, header: bytes, memory: memoryview) -> bool:
        """Write a file and move it into place. Returns False if that fails, and logs the reason
        once."""
        size = len(header) + len(memory)
        if not self._can_write or not self._make_room(size):
            return False
        try:
            if not self._is_ready:
                make_folder(path.parent)
                for folder in self.root.iterdir():
                    sweep(folder, ".*.new")
                self._is_ready = True
            write_file(path, (header, memory))
        except OSError as error:
            warn_once(
                f"packed weights are not kept in {self.root}, so the next start packs them again: "
                f"{explain(error)}"
            )
            self._can_write = False
            return False
        self._total = (self._total or 0) + size
        return True

    def _make_room(self, size: int) -> bool:
        """Delete the files that have been unused for longest until `size` more bytes are within the
        limit. Returns whether they are."""
        if self._total is not None and self._total + size <= self.limit_bytes:
            return True
        files = []
        for file in self.root.glob(f"*/*{SUFFIX}"):
            with contextlib.suppress(OSError):  # another process has just deleted it
                stat = file.stat()
                files.append((stat.st_mtime_ns, stat.st_size, file))
        self._total = sum(length for _, length, _ in files)
        for _, length, file in sorted(files):
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
    """Return what precedes the bytes: the head, a JSON text, and zeros up to the next page."""
    text = json.dumps(
        {"key": key, "size": len(memory), "facts": dict(facts), "sum": _sum(memory)}
    ).encode()
    header = _HEAD.pack(MAGIC, len(text), hashlib.sha256(text).digest()) + text
    return header + bytes(-len(header) % PAGE)


def _sum(memory: memoryview) -> str:
    """Return a checksum of the bytes, in their order: for each page, the sum of its 32-bit words,
    each times a factor of its own, modulo 2⁶⁴; then SHA-256 over these sums and the bytes after the
    last whole page.

    A change of one word is always noticed, and any other change with a probability of at least 1 −
    2⁻³² (multilinear hashing). On one core it takes 34 ms for 100 MB, a third of the time of
    SHA-256 with hardware support. It need not resist an attacker, because only files of trusted
    owners are read."""
    whole = len(memory) // PAGE * PAGE
    pages = np.frombuffer(memory[:whole], "<u4").reshape(-1, PAGE // 4)
    digest = hashlib.sha256(
        np.einsum("ij,j->i", pages, _FACTORS, dtype=np.uint64, casting="safe")
        .astype("<u8")
        .tobytes()
    )
    digest.update(memory[whole:])
    return digest.hexdigest()


def _unpack(mapped: mmap.mmap, key: str) -> Packed | None:
    """Return the weight in a file, or None if the file does not hold the complete and unchanged
    bytes of this key."""
    if len(mapped) < _HEAD.size:
        return None
    magic, size, digest = _HEAD.unpack_from(mapped)
    text = mapped[_HEAD.size : _HEAD.size + min(size, _MOST_HEADER_BYTES)]
    if magic != MAGIC or hashlib.sha256(text).digest() != digest:
        return None
    try:
        content = json.loads(text)
        stored = content["key"]
        num_bytes = content["size"]
        facts = content["facts"]
        checksum = content["sum"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    start = _HEAD.size + size + -(_HEAD.size + size) % PAGE
    if (
        stored != key
        or not isinstance(facts, dict)
        or type(num_bytes) is not int
        or start + num_bytes != len(mapped)
    ):
        return None
    memory = memoryview(mapped)[start:]
    return Packed(memory, facts) if _sum(memory) == checksum else None


def _map(path: Path) -> mmap.mmap:
    """Map a file as private memory, so a reload of the weights can write over it without changing
    the file. Raises OSError, or ValueError if the file is empty."""
    number = open_trusted(path)
    try:
        mapped = mmap.mmap(number, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(number)
    if hasattr(mmap, "MADV_WILLNEED"):
        mapped.madvise(mmap.MADV_WILLNEED)
    return mapped
