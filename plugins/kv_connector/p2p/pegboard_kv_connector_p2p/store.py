"""Blocks in host memory, which other engines ask for or have sent. It imports no torch."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

Name = tuple[int, bytes]
"""A block: its KV group and its hash."""


class BlockStore:
    """The newest blocks that fit into `max_bytes`. All methods may be called by any thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blocks: OrderedDict[Name, memoryview] = OrderedDict()
        self._num_bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False

    def __contains__(self, name: Name) -> bool:
        """Return whether the block is there. It becomes the newest."""
        with self._changed:
            if name not in self._blocks:
                return False
            self._blocks.move_to_end(name)
            return True

    def put(self, name: Name, content: memoryview) -> None:
        """Keep a block. Its content may not change any more."""
        with self._changed:
            before = self._blocks.pop(name, None)
            self._num_bytes += len(content) - (0 if before is None else len(before))
            self._blocks[name] = content
            while self._num_bytes > self._max_bytes and self._blocks:
                _, oldest = self._blocks.popitem(last=False)
                self._num_bytes -= len(oldest)
            self._changed.notify_all()

    def wait_for(self, name: Name, until: float) -> memoryview | None:
        """Return a block as soon as it is there, or None if it is not there at the time `until`
        (`time.monotonic`) or when the store is closed."""
        with self._changed:
            while name not in self._blocks:
                left = until - time.monotonic()
                if left <= 0 or self._is_closed:
                    return None
                self._changed.wait(left)
            self._blocks.move_to_end(name)
            return self._blocks[name]

    def clear(self) -> None:
        """Forget all blocks."""
        with self._changed:
            self._blocks.clear()
            self._num_bytes = 0

    def close(self) -> None:
        """Forget all blocks, and end all waiting."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self.clear()
