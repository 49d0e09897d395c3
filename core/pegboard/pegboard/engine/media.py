"""Media items of prompts: which must be encoded before a chunk can be computed, and E's account of the worker's encoder cache."""

from __future__ import annotations

from collections import OrderedDict

from pegboard.data.request import MediaRef
from pegboard.engine.requests import Request
from pegboard.interfaces.encoder_connector import EncoderConnectorScheduler


class EncoderCache:
    """Which media items are encoded in the worker, which follows through `Batch.encode` and `Batch.free_media`, and how far
    chunks of prompts can go with them.

    An item is *held* by every request that has placeholders of it left to compute. Items nobody holds stay until room is needed,
    oldest first. Sizes are in placeholder tokens. A step encodes as many tokens as the cache holds; items that another engine has
    encoded (connector) are loaded instead and do not count. all_at_once: an encoder-decoder model, whose media are encoded
    together before the first token is computed. to_encode: (request, index of the item) in the step that is being planned.
    """

    def __init__(
        self, capacity_tokens: int, *, connector: EncoderConnectorScheduler | None = None, all_at_once: bool = False
    ) -> None:
        self._capacity_tokens = capacity_tokens
        self._connector = connector
        self._all_at_once = all_at_once
        self._used_tokens = 0
        self._sizes: dict[str, int] = {}
        self._holders: dict[str, set[str]] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._freed: list[str] = []
        self._tokens_left = 0
        self.to_encode: list[tuple[Request, int]] = []

    def __contains__(self, media_hash: str) -> bool:
        return media_hash in self._sizes

    @property
    def held_tokens(self) -> int:
        """Tokens of items somebody needs: room that cannot be made."""
        return self._used_tokens - sum(self._sizes[media_hash] for media_hash in self._idle)

    def is_held(self, item: MediaRef, key: str) -> bool:
        """The request holds the item."""
        return key in self._holders.get(item.hash, ())

    def hold(self, item: MediaRef, key: str) -> None:
        """The request needs this item; nothing happens when the item is not encoded yet."""
        if item.hash in self._sizes:
            self._idle.pop(item.hash, None)
            self._holders[item.hash].add(key)

    def add(self, item: MediaRef, key: str) -> bool:
        """Reserve room for an item that is encoded in this step, and hold it. False when it does not fit next to what is held."""
        if self.held_tokens + item.num_tokens > self._capacity_tokens:
            return False
        while self._used_tokens + item.num_tokens > self._capacity_tokens:
            self._drop(self._idle.popitem(last=False)[0])
        if item.hash in self._freed:  # dropped and wanted again before the worker heard of it
            self._freed.remove(item.hash)
        self._sizes[item.hash] = item.num_tokens
        self._holders[item.hash] = {key}
        self._used_tokens += item.num_tokens
        return True

    def release(self, item: MediaRef, key: str) -> None:
        """The request does not need it any more; nothing happens when it did not hold it."""
        holders = self._holders.get(item.hash)
        if holders is not None and key in holders:
            holders.discard(key)
            if not holders:
                self._idle[item.hash] = None

    def take_freed(self) -> tuple[str, ...]:
        """Hashes the worker may forget, since the last call."""
        freed, self._freed = tuple(self._freed), []
        return freed

    def reset(self) -> None:
        """Forget every item nobody holds."""
        while self._idle:
            self._drop(self._idle.popitem(last=False)[0])

    # --- planning a step ----------------------------------------------------------------------------------------------------

    def start_step(self) -> None:
        """A new step is planned."""
        self._tokens_left, self.to_encode = self._capacity_tokens, []

    def fit(self, request: Request, num_tokens: int) -> tuple[int, list[int]]:
        """How many of the next `num_tokens` tokens can be computed, and the indices of the media to encode first. Books
        nothing. 0 = not in this step."""
        start = request.num_computed_tokens
        end = start + num_tokens
        room = self._capacity_tokens - self.held_tokens
        budget, encode, counted = self._tokens_left, list[int](), set[str]()
        for index in self._needed(request, start, end):  # in order: what comes later must not keep out what comes first
            item = request.media[index]
            if item.hash not in counted:
                counted.add(item.hash)
                room -= item.num_tokens if item.hash not in self._sizes or item.hash in self._idle else 0
                budget -= self._cost(item)
                if room < 0 or budget < 0:
                    end = start if self._all_at_once else max(start, item.offset)
                    break
                if item.hash not in self._sizes:
                    encode.append(index)
            if self._all_at_once and index not in encode:
                encode.append(index)  # its keys and values must be written for this request as well
        return (end - start, encode) if end > start else (0, [])

    def book(self, request: Request, num_tokens: int, encode: list[int]) -> None:
        """Encode these in this step, and hold whatever the chunk touches (before new items push anything out)."""
        start = request.num_computed_tokens
        for index in self._needed(request, start, start + num_tokens):
            self.hold(request.media[index], request.key)
        for index in encode:
            item = request.media[index]
            self._tokens_left -= self._cost(item)
            if item.hash not in self._sizes:
                is_added = self.add(item, request.key)
                assert is_added, "fit() has counted the room"
        self.to_encode.extend((request, index) for index in encode)

    def encodes_for(self, request: Request) -> bool:
        """The step that is being planned encodes media for it: others may count on them already."""
        return any(owner is request for owner, _ in self.to_encode)

    def passed(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens are computed: the items that lie before are not needed any more."""
        for item in request.media:
            if self._all_at_once or item.offset + item.num_tokens <= num_tokens:
                self.release(item, request.key)

    def _needed(self, request: Request, start: int, end: int) -> list[int]:
        """Indices of the media whose placeholders lie in tokens start … end-1; all of them before an encoder-decoder starts."""
        if self._all_at_once:
            return [] if request.row is not None else list(range(len(request.media)))
        return [i for i, item in enumerate(request.media) if item.offset < end and start < item.offset + item.num_tokens]

    def _cost(self, item: MediaRef) -> int:
        """Tokens to encode for this item: none when it is here already, or when another engine has it."""
        if item.hash in self._sizes or (self._connector is not None and self._connector.has([item.hash])[0]):
            return 0
        return item.num_tokens

    def _drop(self, media_hash: str) -> None:
        self._used_tokens -= self._sizes.pop(media_hash)
        del self._holders[media_hash]
        self._freed.append(media_hash)
