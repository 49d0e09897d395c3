"""E's account of the worker's encoder cache: which media items are encoded there, who still needs them, what may go.

An item is *held* by every request that has placeholders of it left to compute. Items nobody holds stay until room is needed,
oldest first. Sizes are in placeholder tokens.
"""

from __future__ import annotations

from collections import OrderedDict

from pegboard.data.request_parts import MediaRef


class EncoderCache:
    """Called by the scheduler; the worker follows through `Batch.encode` and `Batch.free_media`."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.used_tokens = 0
        self._sizes: dict[str, int] = {}
        self._holders: dict[str, set[str]] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._freed: list[str] = []

    def __contains__(self, media_hash: str) -> bool:
        return media_hash in self._sizes

    @property
    def held_tokens(self) -> int:
        """Tokens of items somebody needs: room that cannot be made."""
        return self.used_tokens - sum(self._sizes[media_hash] for media_hash in self._idle)

    def idle_tokens(self, item: MediaRef) -> int:
        """Room that holding an encoded item takes: its size if nobody holds it yet."""
        return self._sizes[item.hash] if item.hash in self._idle else 0

    def is_held(self, item: MediaRef, key: str) -> bool:
        """The request holds the item."""
        return key in self._holders.get(item.hash, ())

    def hold(self, item: MediaRef, key: str) -> bool:
        """The request needs this item. False when the item is not encoded yet."""
        if item.hash not in self._sizes:
            return False
        self._idle.pop(item.hash, None)
        self._holders[item.hash].add(key)
        return True

    def add(self, item: MediaRef, key: str) -> bool:
        """Reserve room for an item that is encoded in this step, and hold it. False when it does not fit beside what is held."""
        if self.held_tokens + item.num_tokens > self.capacity_tokens:
            return False
        while self.used_tokens + item.num_tokens > self.capacity_tokens:
            self._drop(self._idle.popitem(last=False)[0])
        if item.hash in self._freed:  # dropped and wanted again before the worker heard of it
            self._freed.remove(item.hash)
        self._sizes[item.hash] = item.num_tokens
        self._holders[item.hash] = {key}
        self.used_tokens += item.num_tokens
        return True

    def release(self, item: MediaRef, key: str) -> None:
        """The request needs it no more; nothing happens when it did not hold it."""
        holders = self._holders.get(item.hash)
        if holders is None or key not in holders:
            return
        holders.discard(key)
        if not holders:
            self._idle[item.hash] = None

    def take_freed(self) -> tuple[str, ...]:
        """Hashes the worker may forget, since the last call."""
        freed, self._freed = tuple(self._freed), []
        return freed

    def reset(self) -> None:
        """Forget every item nobody holds (the weights changed)."""
        while self._idle:
            self._drop(self._idle.popitem(last=False)[0])

    def _drop(self, media_hash: str) -> None:
        self.used_tokens -= self._sizes.pop(media_hash)
        del self._holders[media_hash]
        self._freed.append(media_hash)
