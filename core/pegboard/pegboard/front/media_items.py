"""Reads and processes the images, audio and videos of prompts, and keeps what was made lately."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from pegboard.config.schema import EngineConfig
from pegboard.data.given_items import GivenItem
from pegboard.data.media import MediaArray, MediaSource
from pegboard.data.prompt_embeds import PromptEmbeds, wrong_embeds
from pegboard.errors import RequestError, blame, expect
from pegboard.interfaces.api import Prompt
from pegboard.interfaces.multimodal_processor import MediaReaderSetup, Processed

GIB = 2**30


class Ready(NamedTuple):
    """A processed item. digest: has the number of rows, because a client may give one name to items
    of different sizes. runs: (first token, number) of the tokens that are rows. was_kept: it comes
    from the cache. rows: those that the client has made; None = the model makes them."""

    digest: str
    token_ids: list[int]
    runs: list[tuple[int, int]]
    arrays: dict[str, MediaArray]
    facts: Mapping[str, Any]
    was_kept: bool = False
    rows: PromptEmbeds | None = None


class Items:
    """What one processor makes of items. Any thread may use it. plugin: whom to blame. reader:
    builds the reader of files. model: names the checkpoint."""

    def __init__(
        self,
        config: EngineConfig,
        processor: Any,
        plugin: str,
        reader: Callable[[MediaReaderSetup], Any],
        model: str,
    ) -> None:
        self._processor = processor
        self._counted: Callable[[Mapping[str, int]], Mapping[str, Any]] = getattr(
            processor, "counted_options", lambda counts: {}
        )
        self._plugin = plugin
        self._model = model.encode()
        self._options = dict(config.mm_processor_kwargs or {})
        self._takes_rows = config.enable_mm_embeds
        self._cache = ProcessorCache(int(config.mm_processor_cache_gb * GIB))
        self._reader = reader(
            MediaReaderSetup(
                domains=tuple(config.allowed_media_domains or ()),
                local_path=config.allowed_local_media_path,
                options=config.media_io_kwargs,
            )
        )

    def reset(self) -> None:
        """Forget what was processed."""
        self._cache.clear()

    def ready(self, source: MediaSource, prompt: Prompt) -> Ready:
        """Return a processed item, from the cache if it was there before. A name counts among
        requests with the same salt."""
        if isinstance(source.value, GivenItem):
            return self._given(source, source.value)
        counts = Counter(each.modality for each in prompt.media)
        with blame(self._plugin):
            options = {**self._counted(counts), **self._options, **prompt.media_options}
        how = msgspec.json.encode(options, order="sorted", enc_hook=repr)
        kind = source.modality.encode()
        if source.uuid is not None:
            salt = (prompt.cache_salt or "").encode()
            digest = _digest(b"uuid", kind, source.uuid.encode(), salt, how, self._model)
            if (ready := self._cache.get(digest)) is not None:
                return ready
            if source.value is None:
                raise RequestError(
                    f"{source.path}: there is no item {source.uuid[:60]!r} in the cache; send it",
                    parameter=source.path,
                )
        value, identity = self._reader.read(source)
        if source.uuid is None:
            digest = _digest(b"content", kind, identity, how, self._model)
            if (ready := self._cache.get(digest)) is not None:
                return ready
        with _named(source.path), blame(self._plugin):
            processed = self._processor.process(source.modality, value, options)
            expect(processed, Processed, self._processor, "process")
            ready = ready_of(digest, processed)
        self._cache.put(digest, ready)
        return ready

    def _given(self, source: MediaSource, item: GivenItem) -> Ready:
        """Return an item whose rows the client has made."""
        rows = item.rows
        if not self._takes_rows:
            raise wrong_embeds(
                source.path,
                "the rows of items are off; start with enable_mm_embeds (--enable-mm-embeds)",
            )
        names = "place_formed_rows", "place_rows"
        name = next((each for each in names if hasattr(self._processor, each)), None)
        if name is None:
            raise wrong_embeds(source.path, "this model takes items only, and not their rows")
        if rows.shape[0] < 1:
            raise wrong_embeds(source.path, "an item needs at least one row")
        has_form = name == names[0]
        if item.form and not has_form:
            others = ", ".join(item.form)[:80]
            reason = f"this model needs only the rows of an item; leave out {others}"
            raise wrong_embeds(source.path, reason)
        with _named(source.path), blame(self._plugin):
            more = (item.form,) if has_form else ()
            placed = getattr(self._processor, name)(source.modality, rows.shape[0], *more)
            ready = ready_of("", expect(placed, Processed, self._processor, name))
            if sum(count for _, count in ready.runs) != rows.shape[0]:
                raise ValueError(f"{name}() must place {rows.shape[0]} rows")
        return ready._replace(rows=rows)


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Let errors that name no field of a request name the item with this path."""
    try:
        yield
    except RequestError as error:
        if error.parameter is not None:
            raise
        raise RequestError(f"{path}: {error}", parameter=path) from error


class ProcessorCache:
    """The items that were processed last. num_bytes: the room for their arrays."""

    def __init__(self, num_bytes: int) -> None:
        self._room = num_bytes
        self._items: OrderedDict[str, Ready] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, digest: str) -> Ready | None:
        with self._lock:
            ready = self._items.get(digest)
            if ready is not None:
                self._items.move_to_end(digest)
                ready = ready._replace(was_kept=True)
            return ready

    def put(self, digest: str, ready: Ready) -> None:
        with self._lock:
            before = self._items.pop(digest, None)
            self._room += 0 if before is None else _size(before)
            self._items[digest] = ready
            self._room -= _size(ready)
            while self._room < 0:
                self._room += _size(self._items.popitem(last=False)[1])

    def clear(self) -> None:
        with self._lock:
            self._room += sum(map(_size, self._items.values()))
            self._items.clear()


def _size(ready: Ready) -> int:
    return sum(len(array.data) for array in ready.arrays.values())


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def ready_of(digest: str, processed: Processed) -> Ready:
    token_ids = list(processed.token_ids)
    runs: list[tuple[int, int]] = []
    if processed.is_row is None:
        runs.append((0, len(token_ids)))
    else:
        for place, is_row in enumerate(processed.is_row.tolist()):
            if is_row and runs and sum(runs[-1]) == place:
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            elif is_row:
                runs.append((place, 1))
    if not runs:
        raise ValueError("process() returned an item without rows")
    arrays = {
        name: MediaArray(array.tobytes(), str(array.dtype), array.shape)
        for name, array in processed.arrays.items()
    }
    num_rows = sum(count for _, count in runs)
    return Ready(f"{digest}-{num_rows}", token_ids, runs, arrays, processed.facts)


def parts_of(rows: PromptEmbeds, places: Sequence[tuple[int, int]]) -> list[PromptEmbeds]:
    """Return the rows of an item as spans of the prompt. places: (first position, number)."""
    size = len(rows.data) // rows.shape[0]
    first = 0
    parts = []
    for start, count in places:
        data = rows.data[first * size : (first + count) * size]
        parts.append(PromptEmbeds(data, rows.dtype, (count, rows.shape[1]), start, rows.path))
        first += count
    return parts
