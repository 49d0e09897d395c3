"""The folder of the blocks: names, atomic writes, and the deletion of old blocks. It imports no
torch.

    <folder>/<identity>/rank<rank>/<first byte of the hash>/<group>-<hash>.safetensors
    <folder>/<identity>/engine.json    what the engine says about itself (see `neighbours`)

A file is written under a temporary name and then renamed, so a name never shows half a file. Two
processes that write the same block write the same content, and the last rename counts. The time of
a file is the time of its last use.
"""

from __future__ import annotations

import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pegboard.errors import ConfigError
from pegboard.interfaces.kv_connector import KVConnectorSetup
from pegboard.log import get_logger
from pegboard_kv_connector_shared_storage.options import SharedStorageOptions

log = get_logger(__name__)

SUFFIX = ".safetensors"
FACTS_FILE = "engine.json"
TEMPORARY = ".tmp"
ABANDONED_S = 600.0
"""Seconds after which a temporary file belongs to a process that has died."""
KEPT_SHARE = 0.9
"""The share of the limit that is left after old blocks were deleted."""
CHECK_SHARE = 0.02
"""After this share of the limit was written, the folder is measured again. Other processes may have
written too."""

Buffer = bytes | bytearray | memoryview


class BlockFolder:
    """The blocks of one engine and rank below `root`. home: the folder of the engine's identity.
    max_bytes: limit of all blocks below `root`; 0 = none."""

    def __init__(self, root: Path, identity: str, rank: int, max_bytes: int) -> None:
        self.root = root
        self.home = os.path.join(root, (identity or "none")[:32])
        self._base = os.path.join(self.home, f"rank{rank}")
        self._max_bytes = max_bytes
        self._unchecked_bytes = max_bytes  # the folder is measured after the first write
        self._lock = threading.Lock()

    @classmethod
    def open(cls, options: SharedStorageOptions, setup: KVConnectorSetup) -> BlockFolder:
        """Make the folder, and return it. Raises ConfigError if that is not possible."""
        root = options.shared_storage_path.expanduser().absolute()
        folder = cls(root, setup.plan.identity, setup.rank, int(options.max_size_gb * 2**30))
        try:
            os.makedirs(folder._base, exist_ok=True)
        except OSError as error:
            reason = f"{error.strerror} ({error.filename})"
            raise ConfigError(
                f"shared_storage_path: cannot make a folder in {root}: {reason}; name another "
                "folder"
            ) from error
        if options.role != "kv_consumer" and not os.access(folder._base, os.W_OK):
            raise ConfigError(
                f"shared_storage_path: {folder._base} is not writable; allow writing, or set role "
                "to kv_consumer"
            )
        return folder

    def path(self, group: int, block_hash: bytes) -> str:
        """Return the path of a block's file."""
        name = block_hash.hex()
        return f"{self._base}/{name[:2]}/{group}-{name}{SUFFIX}"

    def has(self, group: int, block_hash: bytes) -> bool:
        """Return whether there is something under the block's name. Only `read` finds out whether
        it is right."""
        return os.path.lexists(self.path(group, block_hash))

    def read(self, group: int, block_hash: bytes, buffers: Sequence[Buffer]) -> None:
        """Fill the buffers with the content of the block's file, and mark it as used. Raises
        ValueError or OSError if it is missing or is not a regular file of exactly that size."""
        path = self.path(group, block_hash)
        num_bytes = sum(len(buffer) for buffer in buffers)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is not a regular file")
            if status.st_size != num_bytes:
                raise ValueError(f"it has {status.st_size} bytes, expected {num_bytes}")
            for buffer in buffers:
                rest = memoryview(buffer)
                while len(rest):
                    count = os.readv(descriptor, [rest])
                    if count == 0:
                        raise ValueError("it became shorter while it was read")
                    rest = rest[count:]
            if self._max_bytes:
                try:
                    os.utime(descriptor)
                except OSError:  # another user's file, or a folder that is only read
                    log.debug("the time of %s cannot be set", path)
        finally:
            os.close(descriptor)

    def write(self, group: int, block_hash: bytes, buffers: Sequence[Buffer]) -> None:
        """Write the block's file, and delete old blocks if there are too many. Raises OSError."""
        path = self.path(group, block_hash)
        temporary = f"{path}.{secrets.token_hex(8)}{TEMPORARY}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            with open(temporary, "xb", buffering=0) as file:
                for buffer in buffers:
                    rest = memoryview(buffer)
                    while len(rest):
                        rest = rest[file.write(rest) :]
            os.replace(temporary, path)
        except OSError:
            self._delete(temporary)
            raise
        self._written(sum(len(buffer) for buffer in buffers))

    def remove(self, group: int, block_hash: bytes) -> None:
        """Delete a file that is not the block that its name says."""
        self._delete(self.path(group, block_hash))

    def _delete(self, path: str | Path) -> bool:
        try:
            os.unlink(path)
        except OSError:  # another process was faster, or it is not ours
            return False
        return True

    # --- the limit --------------------------------------------------------------------------------

    def _written(self, num_bytes: int) -> None:
        if not self._max_bytes:
            return
        with self._lock:
            self._unchecked_bytes += num_bytes
            if self._unchecked_bytes < self._max_bytes * CHECK_SHARE:
                return
            self._unchecked_bytes = 0
        self._trim()

    def _trim(self) -> None:
        """Delete abandoned temporary files, and the least recently used blocks of all engines,
        until the folder is small enough."""
        blocks = []
        num_bytes = 0
        for entry in files_below(self.root):
            try:
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if entry.name.endswith(TEMPORARY):
                if status.st_mtime < time.time() - ABANDONED_S:
                    self._delete(entry.path)
                continue
            blocks.append((status.st_mtime, status.st_size, entry.path))
            num_bytes += status.st_size
        if num_bytes <= self._max_bytes:
            return
        num_deleted = 0
        for _, size, path in sorted(blocks):
            if num_bytes <= self._max_bytes * KEPT_SHARE:
                break
            num_bytes -= size
            num_deleted += self._delete(path)
        log.debug("deleted %d old KV blocks from %s", num_deleted, self.root)


def files_below(folder: str | Path, depth: int = 0) -> Iterator[os.DirEntry[str]]:
    """Yield the files of blocks below a folder, those that `BlockFolder` could have written and
    nothing else, and temporary files. depth: 0 for the whole folder, 1 for that of an identity."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        if depth < 3 and entry.is_dir(follow_symlinks=False):
            yield from files_below(entry.path, depth + 1)
        elif entry.name.endswith(TEMPORARY if depth == 1 else (SUFFIX, TEMPORARY)) and (
            depth == 3 or (depth == 1 and entry.name.startswith(FACTS_FILE))
        ):
            yield entry


def has_blocks(home: str) -> bool:
    """Return whether there are blocks in the folder of an identity."""
    return any(entry.name.endswith(SUFFIX) for entry in files_below(home, 1))
