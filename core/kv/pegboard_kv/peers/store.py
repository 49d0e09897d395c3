"""Blocks in host memory, which other engines ask for or have sent. It imports no torch."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from pegboard_kv.peers.memory import AnyMemory, Memory

Name = tuple[int, bytes]
"""A block: its KV group and its hash."""


class HostStore:
    """The newest blocks that fit into `max_bytes` of `memory`. All methods may be called by any
    thread. Who has got a block may read it as long as it likes."""

    def __init__(self, max_bytes: int, memory: Memory | None = None) -> None:
        self._max_bytes = max_bytes
        self._memory = memory or AnyMemory()
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

    def room(self, num_bytes: int) -> memoryview | None:
        """Return a part of the memory. The oldest blocks make room. None: all of it is in use."""
        with self._changed:
            part = self._memory.take(num_bytes)
            while part is None and self._blocks:
                self._drop_oldest()
                part = self._memory.take(num_bytes)
            return part

    def save(self, name: Name, content: memoryview) -> None:
        """Keep a block that is in any memory, if there is room. Its content may not change any
        more."""
        if self._memory.is_any:
            self.put(name, content)
            return
        part = self.room(len(content))
        if part is not None:
            part[:] = content
            self.put(name, part)

    def put(self, name: Name, content: memoryview) -> None:
        """Keep a block that is in the memory. Its content may not change any more."""
        with self._changed:
            before = self._blocks.pop(name, None)
            self._num_bytes += len(content) - (0 if before is None else len(before))
            self._blocks[name] = content
            while self._num_bytes > self._max_bytes and self._blocks:
                self._drop_oldest()
            self._changed.notify_all()

    def _drop_oldest(self) -> None:
        _, oldest = self._blocks.popitem(last=False)
        self._num_bytes -= len(oldest)

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
