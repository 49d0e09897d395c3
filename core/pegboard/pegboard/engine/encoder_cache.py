"""Which images, audio and videos the workers keep the rows of, and which ones a step encodes."""

from __future__ import annotations

from pegboard.config.limits import Limits
from pegboard.data.media import MediaItem
from pegboard.engine.gates import Gate
from pegboard.engine.requests import Request


class EncoderCache(Gate):
    """Rows are kept by the digest of their item. A request holds those that it computes. The rest
    stays for others, until there is no more room; the longest unused ones go first. An item that is
    larger than all the room is encoded when no rows are held."""

    def __init__(self, limits: Limits) -> None:
        self._budget = limits.max_num_encoder_input_tokens
        self._room = limits.encoder_cache_size
        self._splits = not limits.disable_chunked_mm_input
        self._sizes: dict[str, int] = {}
        """digest → number of rows, the longest unused first"""
        self._holders: dict[str, set[Request]] = {}
        self._new: list[MediaItem] = []
        self._dropped: list[str] = []

    def begin(self, *, is_idle: bool) -> None:
        """Let go of all items but those that requests have computed a part of. Items of a step that
        computed nothing are not encoded."""
        for digest, holders in [*self._holders.items()]:
            for request in [*holders]:
                computed = request.num_computed_tokens
                if not any(
                    item.start < computed < item.stop and item.digest == digest
                    for item in request.media
                ):
                    self._release(digest, request)
        for item in [*self._new]:
            self._drop(item.digest)

    def limit(self, request: Request, num_tokens: int) -> int:
        """Return how many of the request's next `num_tokens` tokens a step can compute. The items
        among them are encoded before."""
        start = request.num_computed_tokens
        for item in request.media:
            if item.stop <= start:
                continue
            if item.start >= start + num_tokens:
                break
            is_cut = item.stop > start + num_tokens and not self._splits
            if (is_cut and item.start > start) or not self._hold(item, request):
                return max(0, item.start - start)
        return num_tokens

    def take(self) -> tuple[list[MediaItem], list[str]]:
        """Return the items that the next batch encodes, and the digests of rows that it drops
        before."""
        new = self._new
        dropped = self._dropped
        self._new = []
        self._dropped = []
        return new, dropped

    def weights_changed(self) -> None:
        for digest in [*self._sizes]:
            self._drop(digest)
        self._holders.clear()

    def leave(self, request: Request) -> None:
        for item in request.media:
            self._release(item.digest, request)

    ended = leave

    def _release(self, digest: str, request: Request) -> None:
        if (holders := self._holders.get(digest)) is not None:
            holders.discard(request)
            if not holders:
                del self._holders[digest]

    def _hold(self, item: MediaItem, request: Request) -> bool:
        """Keep the rows of an item for a request. Return False if they cannot be made now."""
        holders = self._holders.get(item.digest, set())
        if request not in holders:
            if item.digest not in self._sizes and not self._encode(item):
                return False
            self._sizes[item.digest] = self._sizes.pop(item.digest)  # it was used last
            self._holders.setdefault(item.digest, set()).add(request)
        return True

    def _drop(self, digest: str) -> int:
        """Forget an item, and return the number of its rows."""
        before = len(self._new)
        self._new = [each for each in self._new if each.digest != digest]
        if len(self._new) == before:  # the workers know it
            self._dropped.append(digest)
        return self._sizes.pop(digest)

    def _encode(self, item: MediaItem) -> bool:
        size = item.num_rows
        used = sum(each.num_rows for each in self._new)
        if used and used + size > self._budget:
            return False
        held = sum(self._sizes[digest] for digest in self._holders)
        if held and held + size > self._room:
            return False
        free = self._room - sum(self._sizes.values())
        for digest in [*self._sizes]:
            if free >= size:
                break
            if digest not in self._holders:
                free += self._drop(digest)
        self._sizes[item.digest] = size
        self._new.append(item)
        return True
