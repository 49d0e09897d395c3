"""Makes what the engine gets of the images, audio and videos in a prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pegboard.data.media import MediaItem, MediaSource, no_media
from pegboard.data.prompt_embeds import PromptEmbeds
from pegboard.data.request import LoRARequest
from pegboard.errors import RequestError, blame, expect
from pegboard.front.media_items import Items, parts_of
from pegboard.interfaces.api import Prompt
from pegboard.interfaces.multimodal_processor import (
    MultiModalProcessorSetup,
    MultiModalProcessorSpec,
    PlacedItem,
    Placeholder,
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

FIRST_ADAPTER = 2**62
"""The number of the first adapter of default_mm_loras."""


class Expanded(NamedTuple):
    """A prompt with the tokens of its items. rows: of items whose rows the client has made, which
    the engine takes as embeddings. inputs: other inputs of the model, for each token."""

    token_ids: list[int]
    items: tuple[MediaItem, ...]
    rows: tuple[PromptEmbeds, ...]
    inputs: dict[str, list[int]]


def make_media(
    plan: "EnginePlan", registry: "Registry | None", tokenizer: "Tokenizer | None"
) -> "MediaInputs | None":
    """Return None if the engine takes only text."""
    if plan.multimodal_processor is None or registry is None or tokenizer is None:
        return None
    return MediaInputs(plan, registry, tokenizer)


class MediaInputs:
    """The processor of one model, and where its items are in prompts. Any thread may use it."""

    def __init__(self, plan: "EnginePlan", registry: "Registry", tokenizer: "Tokenizer") -> None:
        engine = plan.settings.engine
        entry = registry.find("multimodal_processor", plan.multimodal_processor or "")
        spec = registry.spec(entry)
        assert isinstance(spec, MultiModalProcessorSpec)
        self._plugin = entry.id
        setup = MultiModalProcessorSetup(plan.checkpoint, tokenizer)
        self._processor = registry.build(entry, setup)
        self._pad = getattr(self._processor, "padded", None)
        self._rewrite = getattr(self._processor, "rewritten", None)
        self._number = getattr(self._processor, "heading", None)
        self._make_inputs = getattr(self._processor, "inputs", None)
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
            self.items = Items(engine, self._processor, entry.id, reader, plan.checkpoint.digest)

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
        places = [
            (done, source.modality)
            for source, kind in zip(sources, kinds, strict=True)
            if kind.is_first
        ]
        places += self._places(token_ids)
        expanded = [*next((each.beginning for each in kinds if each.beginning), ())]
        items: list[MediaItem] = []
        rows: list[PromptEmbeds] = []
        placed: list[PlacedItem] = []
        for place, modality in places:
            if place < done:
                continue
            expanded += token_ids[done:place]
            if not waiting[modality]:
                raise self._wrong_number(modality, counts[modality], "more")
            ready = self.items.ready(waiting[modality].pop(0), prompt)
            number = counts[modality] - len(waiting[modality]) - 1
            expanded += self._heading(modality, number, ready.facts)
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
        expanded += [*token_ids[done:], *(() if has_end else ending), *prompt.continuation]
        for name, rest in waiting.items():
            if rest:
                raise self._wrong_number(name, counts[name], "fewer")
        inputs = self._inputs(expanded, placed)
        return Expanded(expanded, tuple(items), tuple(rows), inputs)

    def padded(self, token_ids: list[int]) -> list[int]:
        """Return the tokens of a prompt without items as the model reads them."""
        if self._pad is None:
            return token_ids
        with blame(self._plugin):
            return [*self._pad(token_ids)]

    def rewritten(self, prompt: Prompt) -> Prompt:
        """Return a prompt with items as it is tokenized. A chat keeps its tokens if its text stays
        as it is."""
        has_tokens = prompt.token_ids is not None and prompt.chat is None
        if self._rewrite is None or prompt.text is None or has_tokens:
            return prompt
        with blame(self._plugin):
            text = expect(self._rewrite(prompt.text), str, self._processor, "rewritten")
        if text == prompt.text:
            return prompt
        has_start = prompt.add_special_tokens and prompt.chat is None
        return replace(prompt, text=text, token_ids=None, add_special_tokens=has_start)

    def _heading(self, modality: str, number: int, facts: Mapping[str, Any]) -> list[int]:
        """Return the tokens before those of an item. number: of those before it."""
        if self._number is None:
            return []
        with blame(self._plugin):
            return [*self._number(modality, number, facts)]

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
        ready = self.items.ready(source, prompt)
        num_rows = len(ready.token_ids)
        item = MediaItem(
            source.modality, ready.digest, ((0, 1),), ready.arrays, num_rows, ready.was_kept
        )
        return Expanded([*token_ids, *prompt.continuation], (item,), (), {})

    def _inputs(
        self, token_ids: Sequence[int], placed: Sequence[PlacedItem]
    ) -> dict[str, list[int]]:
        if self._make_inputs is None:
            return {}
        with blame(self._plugin):
            numbers = self._make_inputs(token_ids, placed)
            inputs = {name: list(values) for name, values in numbers.items()}
            if any(len(values) != len(token_ids) for values in inputs.values()):
                raise ValueError(f"inputs() must return {len(token_ids)} numbers for each name")
            return inputs

    def _places(self, token_ids: Sequence[int]) -> Iterator[tuple[int, str]]:
        """Yield the place and the modality of each placeholder in a prompt."""
        for place, token in enumerate(token_ids):
            for name, placeholder in self._placeholders.items() if token in self._firsts else ():
                target = placeholder.token_ids
                is_here = tuple(token_ids[place : place + len(target)]) == target
                if is_here and not placeholder.is_first:
                    yield place, name
                    break

    def _wrong_number(self, modality: str, count: int, comparison: str) -> RequestError:
        text = self._placeholders[modality].text
        return RequestError(
            f"the prompt has {comparison} placeholders {text!r} than items of type {modality}, of "
            f"which there are {count}; write one for each",
            parameter="prompt",
        )


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
