"""Makes what the engine gets of the images, audio and videos in a prompt."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pegboard.data.media import MediaArray, MediaItem, MediaSource, no_media
from pegboard.data.prompt_embeds import PromptEmbeds, wrong_embeds
from pegboard.data.request import LoRARequest
from pegboard.errors import RequestError, blame, expect
from pegboard.interfaces.api import Prompt
from pegboard.interfaces.multimodal_processor import (
    MediaReaderSetup,
    MultiModalProcessorSetup,
    MultiModalProcessorSpec,
    PlacedItem,
    Placeholder,
    Processed,
    Transcriber,
)
from pegboard.log import get_logger
from pegboard.plan.media import most_items
from pegboard.plugins.importing import import_part

if TYPE_CHECKING:
    from pegboard.interfaces.tokenizer import Tokenizer
    from pegboard.plan.engine_plan import EnginePlan
    from pegboard.plugins.registry import Registry

log = get_logger(__name__)

GIB = 2**30
FIRST_ADAPTER = 2**62
"""The number of the first adapter of default_mm_loras."""


class Expanded(NamedTuple):
    """A prompt with the tokens of its items. rows: of items whose rows the client has made, which
    the engine takes as embeddings. inputs: other inputs of the model, for each token."""

    token_ids: list[int]
    items: tuple[MediaItem, ...]
    rows: tuple[PromptEmbeds, ...]
    inputs: dict[str, list[int]]


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


def make_media(
    plan: "EnginePlan", registry: "Registry | None", tokenizer: "Tokenizer | None"
) -> "MediaInputs | None":
    """Return None if the engine takes only text."""
    if plan.multimodal_processor is None or registry is None or tokenizer is None:
        return None
    return MediaInputs(plan, registry, tokenizer)


class MediaInputs:
    """The processor of one model, and what it has made lately. Any thread may use it."""

    def __init__(self, plan: "EnginePlan", registry: "Registry", tokenizer: "Tokenizer") -> None:
        engine = plan.settings.engine
        entry = registry.find("multimodal_processor", plan.multimodal_processor or "")
        spec = registry.spec(entry)
        assert isinstance(spec, MultiModalProcessorSpec)
        self._plugin = entry.id
        self._options = dict(engine.mm_processor_kwargs or {})
        self._takes_rows = engine.enable_mm_embeds
        setup = MultiModalProcessorSetup(plan.checkpoint, tokenizer)
        self._processor = registry.build(entry, setup)
        self._limits = {
            name: most_items(engine.limit_mm_per_prompt, name) for name in spec.modalities
        }
        with blame(entry.id):
            self._placeholders: dict[str, Placeholder] = {
                name: expect(
                    self._processor.placeholder(name), Placeholder, self._processor, "placeholder"
                )
                for name in spec.modalities
                if self._limits[name]
            }
            self.transcriber: Transcriber | None = (
                self._processor if "transcribes" in spec.flags else None
            )
            every = self._placeholders.values()
            inside = [each for each in every if each.token_ids and not each.is_first]
            self.begins_prompts = any(each.is_first for each in every)
            self._firsts = {each.token_ids[0] for each in inside}
            self.feeds_encoder = not all(each.token_ids or each.is_first for each in every)
            self.texts = {name: each.text for name, each in self._placeholders.items()}
            reader = import_part(entry, spec.reader, "reader")
            self._reader = reader(
                MediaReaderSetup(
                    domains=tuple(engine.allowed_media_domains or ()),
                    local_path=engine.allowed_local_media_path,
                    options=engine.media_io_kwargs,
                )
            )
        self._model = plan.checkpoint.digest.encode()
        self._cache = ProcessorCache(int(engine.mm_processor_cache_gb * GIB))

    def expand(self, token_ids: Sequence[int], prompt: Prompt) -> "Expanded":
        """Return the prompt with its items. token_ids: its tokens, with placeholders. Raises
        RequestError, which names the item that is wrong."""
        sources = prompt.media
        counts = self._counts(sources)
        if self.feeds_encoder:
            return self._beside(token_ids, prompt)
        waiting = {
            name: [source for source in sources if source.modality == name]
            for name in self._placeholders
        }
        kinds = [self._placeholders[source.modality] for source in sources]
        done = _start([each.token_ids for each in kinds if each.is_first], token_ids)
        places: list[tuple[int, str | None]] = [
            (done, source.modality)
            for source, kind in zip(sources, kinds, strict=True)
            if kind.is_first
        ]
        places += [
            (place, self._modality_at(token_ids, place))
            for place, token in enumerate(token_ids)
            if token in self._firsts
        ]
        expanded: list[int] = []
        items: list[MediaItem] = []
        rows: list[PromptEmbeds] = []
        placed: list[PlacedItem] = []
        for place, modality in places:
            if modality is None or place < done:
                continue
            expanded += token_ids[done:place]
            if not waiting[modality]:
                raise self._wrong_number(modality, counts[modality], "more")
            ready = self._ready(waiting[modality].pop(0), prompt)
            start = len(expanded)
            spans = tuple((start + first, count) for first, count in ready.runs)
            if ready.rows is None:
                item = MediaItem(
                    modality, ready.digest, spans, ready.arrays, was_kept=ready.was_kept
                )
                items.append(item)
            else:
                rows += parts_of(ready.rows, spans)
            expanded += ready.token_ids
            placed.append(PlacedItem(modality, start, len(expanded), ready.facts))
            placeholder = self._placeholders[modality]
            done = place if placeholder.is_first else place + len(placeholder.token_ids)
        ending = next((each.ending for each in kinds if each.ending), ())
        has_end = tuple(token_ids[max(0, len(token_ids) - len(ending)) :]) == ending
        expanded += [*token_ids[done:], *(() if has_end else ending)]
        for name, rest in waiting.items():
            if rest:
                raise self._wrong_number(name, counts[name], "fewer")
        inputs = self._inputs(expanded, placed)
        return Expanded(expanded, tuple(items), tuple(rows), inputs)

    def padded(self, token_ids: list[int]) -> list[int]:
        """Return the tokens of a prompt without items as the model reads them."""
        with blame(self._plugin):
            return [*getattr(self._processor, "padded", list)(token_ids)]

    def _counts(self, sources: "Sequence[MediaSource]") -> Counter[str]:
        """Return how many items of each modality there are."""
        counts = Counter(source.modality for source in sources)
        for source in sources:
            if source.modality not in self._placeholders:
                raise no_media(source.modality, source.path, self._placeholders)
            if counts[source.modality] > (most := self._limits[source.modality]):
                raise RequestError(
                    f"the prompt has {counts[source.modality]} items of type {source.modality}; at "
                    f"most {most} may be in one (limit_mm_per_prompt)",
                    parameter=source.path,
                )
        return counts

    def _beside(self, token_ids: Sequence[int], prompt: Prompt) -> "Expanded":
        """Return a prompt whose item goes to the encoder."""
        if len(prompt.media) != 1:
            raise RequestError(
                f"this model answers about one item of type {', '.join(self._placeholders)}, and "
                f"the prompt has {len(prompt.media)}",
                parameter="multi_modal_data",
            )
        source = prompt.media[0]
        ready = self._ready(source, prompt)
        num_rows = len(ready.token_ids)
        item = MediaItem(
            source.modality, ready.digest, ((0, 1),), ready.arrays, num_rows, ready.was_kept
        )
        return Expanded([*token_ids], (item,), (), {})

    def _inputs(
        self, token_ids: Sequence[int], placed: Sequence[PlacedItem]
    ) -> dict[str, list[int]]:
        make = getattr(self._processor, "inputs", None)
        if make is None:
            return {}
        with blame(self._plugin):
            inputs = {name: list(values) for name, values in make(token_ids, placed).items()}
            if any(len(values) != len(token_ids) for values in inputs.values()):
                raise ValueError(f"inputs() must return {len(token_ids)} numbers for each name")
            return inputs

    def reset(self) -> None:
        """Forget what was processed."""
        self._cache.clear()

    def _modality_at(self, token_ids: Sequence[int], place: int) -> str | None:
        return next(
            (
                name
                for name, kind in self._placeholders.items()
                if tuple(token_ids[place : place + len(kind.token_ids)]) == kind.token_ids
                and not kind.is_first
            ),
            None,
        )

    def _wrong_number(self, modality: str, count: int, comparison: str) -> RequestError:
        text = self._placeholders[modality].text
        return RequestError(
            f"the prompt has {comparison} placeholders {text!r} than items of type {modality}, of "
            f"which there are {count}; write one for each",
            parameter="prompt",
        )

    def _ready(self, source: MediaSource, prompt: Prompt) -> Ready:
        """Return a processed item, from the cache if it was there before. A name counts among
        requests with the same salt."""
        if isinstance(source.value, PromptEmbeds):
            return self._given(source, source.value)
        options = {**self._options, **prompt.media_options}
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
        try:
            with blame(self._plugin):
                processed = self._processor.process(source.modality, value, options)
                expect(processed, Processed, self._processor, "process")
                ready = _ready_of(digest, processed)
        except RequestError as error:
            if error.parameter is not None:
                raise
            raise RequestError(f"{source.path}: {error}", parameter=source.path) from error
        self._cache.put(digest, ready)
        return ready

    def _given(self, source: MediaSource, rows: PromptEmbeds) -> Ready:
        """Return an item whose rows the client has made."""
        if not self._takes_rows:
            raise wrong_embeds(
                source.path,
                "the rows of items are off; start with enable_mm_embeds (--enable-mm-embeds)",
            )
        place = getattr(self._processor, "place_rows", None)
        if place is None:
            raise wrong_embeds(source.path, "this model takes items only, and not their rows")
        if rows.shape[0] < 1:
            raise wrong_embeds(source.path, "an item needs at least one row")
        with blame(self._plugin):
            placed = place(source.modality, rows.shape[0])
            ready = _ready_of("", expect(placed, Processed, self._processor, "place_rows"))
            if sum(count for _, count in ready.runs) != rows.shape[0]:
                raise ValueError(f"place_rows() must place {rows.shape[0]} rows")
        return ready._replace(rows=rows)


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


def _start(begins: Sequence[Sequence[int]], token_ids: Sequence[int]) -> int:
    """Return how many tokens at the beginning of a prompt are one of `begins`."""
    fits = [begin for begin in begins if [*token_ids[: len(begin)]] == [*begin]]
    return max(map(len, fits), default=0)


def adapter_of(prompt: Prompt, adapters: Mapping[str, str]) -> LoRARequest | None:
    """Return the adapter for the modality in a prompt, None if it has several. adapters: modality →
    folder (default_mm_loras)."""
    names = sorted({source.modality for source in prompt.media} & adapters.keys())
    if len(names) > 1:
        every = " and ".join(names)
        log.warning("default_mm_loras has adapters for %s, and a prompt has both: none", every)
    if len(names) != 1:
        return None
    number = FIRST_ADAPTER + sorted(adapters).index(names[0])
    return LoRARequest(names[0], number, adapters[names[0]])


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


def _size(ready: Ready) -> int:
    return sum(len(array.data) for array in ready.arrays.values())


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _ready_of(digest: str, processed: Processed) -> Ready:
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
