"""Media items of prompts: which must be encoded before a chunk can be computed, and where a chunk must end because of them."""

from __future__ import annotations

from pegboard.data.request import Request
from pegboard.data.request_parts import MediaRef
from pegboard.engine.encoder_cache import EncoderCache
from pegboard.engine.step_plan import StepPlan
from pegboard.errors import blame
from pegboard.interfaces.encoder_connector import EncoderConnectorScheduler


class MediaPlanner:
    """all_at_once: an encoder-decoder model, whose media are encoded together before the first token is computed.
    never_split: no chunk ends inside an item."""

    def __init__(
        self, cache: EncoderCache, connector: EncoderConnectorScheduler | None, *, all_at_once: bool, never_split: bool
    ) -> None:
        self._cache = cache
        self._connector = connector
        self._all_at_once = all_at_once
        self._never_split = never_split

    def fit(self, request: Request, num_tokens: int, plan: StepPlan) -> tuple[int, list[int]]:
        """How many of the next `num_tokens` tokens can be computed, and the indices of the media to encode first. Books
        nothing. 0 = not in this step."""
        start = request.num_computed_tokens
        end = self._whole_items(request, start, start + num_tokens, plan) if self._never_split else start + num_tokens
        room = self._cache.capacity_tokens - self._cache.held_tokens
        budget, encode, counted = plan.encoder_tokens_left, [], set()
        for index in self._needed(request, start, end):  # in order: what comes later must not keep out what comes first
            item = request.media[index]
            is_new = item.hash not in self._cache
            if item.hash not in counted:
                counted.add(item.hash)
                room -= item.num_tokens if is_new else self._cache.idle_tokens(item)
                budget -= item.num_tokens if is_new and not self._is_elsewhere(item) else 0
                if room < 0 or budget < 0:
                    end = start if self._all_at_once else max(start, item.offset)
                    break
                if is_new:
                    encode.append(index)
            if self._all_at_once and index not in encode:
                encode.append(index)  # its keys and values must be written for this request as well
        return (end - start, encode) if end > start else (0, [])

    def book(self, request: Request, num_tokens: int, encode: list[int], plan: StepPlan) -> None:
        """Encode these in this step, and hold whatever the chunk touches (before new items push anything out)."""
        start = request.num_computed_tokens
        for index in self._needed(request, start, start + num_tokens):
            self._cache.hold(request.media[index], request.key)
        for index in encode:
            item = request.media[index]
            if item.hash not in self._cache:
                is_added = self._cache.add(item, request.key)
                assert is_added, "fit() has counted the room"
                plan.encoder_tokens_left -= 0 if self._is_elsewhere(item) else item.num_tokens
        plan.encode.extend((request, index) for index in encode)

    def _needed(self, request: Request, start: int, end: int) -> list[int]:
        """Indices of the media whose placeholders lie in tokens start … end-1; all of them before an encoder-decoder starts."""
        if self._all_at_once:
            return [] if request.row is not None else list(range(len(request.media)))
        return [i for i, item in enumerate(request.media) if item.offset < end and start < item.offset + item.num_tokens]

    def passed(self, request: Request, num_tokens: int) -> None:
        """The first `num_tokens` tokens are computed: what lies behind is needed no more."""
        for item in request.media:
            if self._all_at_once or item.offset + item.num_tokens <= num_tokens:
                self._cache.release(item, request.key)

    def _is_elsewhere(self, item: MediaRef) -> bool:
        """Another engine has encoded it: the worker loads it, and no encoder budget is spent."""
        if self._connector is None:
            return False
        with blame("encoder_connector"):
            return self._connector.has([item.hash])[0]

    def _whole_items(self, request: Request, start: int, end: int, plan: StepPlan) -> int:
        """Move the end of a chunk out of the item it falls into: behind it when the step has room, else before it."""
        for item in request.media:
            stop = item.offset + item.num_tokens
            if item.offset < end < stop:
                return stop if stop - start <= plan.tokens_left else max(start, item.offset)
        return end
