"""Images, audio and video in a prompt: as they come with a request, and as the front sends them to
the engine. This file does not import numpy, because the API process loads it at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pegboard.data.given_items import given_item
from pegboard.errors import MalformedRequest, RequestError, brief

PARTS = {
    "image_url": "image",
    "image_pil": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "video_url": "video",
    "image_embeds": "image",
    "audio_embeds": "audio",
    "video_embeds": "video",
}
"""Type of a part of a message → the modality of the item in it. The part has it under a key with
the name of the type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaSource:
    """An item as it came with a request. value: a URL, the bytes of a file, an object such as a PIL
    image or a numpy array, or the rows of the item, a `GivenItem`. uuid: what the client calls
    it; the item counts as the same as one with this name. path: of the field, for errors."""

    modality: str
    value: Any
    uuid: str | None = None
    path: str = "multi_modal_data"


class MediaArray(msgspec.Struct, frozen=True):
    """data: the numbers one after the other, little-endian. dtype: numpy's name of their type."""

    data: bytes
    dtype: str
    shape: tuple[int, ...]


class MediaItem(msgspec.Struct, frozen=True):
    """One item. modality: "image", "audio" or "video". digest: of what the item is and how it was
    processed; items with the same digest have the same rows. places: (first position, number) of
    the positions in the prompt whose rows the model's `encode` makes, in the order of the rows.
    arrays: what `encode` gets. num_cross_rows: set if the item is not in the prompt, and cross
    attention reads its rows instead. Its place is then the first token, which needs them first.
    was_kept: it was not processed for this prompt."""

    modality: str
    digest: str
    places: tuple[tuple[int, int], ...]
    arrays: Mapping[str, MediaArray]
    num_cross_rows: int = 0
    was_kept: bool = False

    @property
    def num_rows(self) -> int:
        return self.num_cross_rows or sum(count for _, count in self.places)

    @property
    def start(self) -> int:
        """The first of these positions."""
        return self.places[0][0]

    @property
    def stop(self) -> int:
        """The position after the last one."""
        first, count = self.places[-1]
        return first + count


def take_media(
    messages: Iterable[Mapping[str, Any]],
    placeholders: Mapping[str, str],
    *,
    interleaves: bool = False,
) -> tuple[list[Mapping[str, Any]], list[MediaSource]]:
    """Take the items out of messages in OpenAI's form. Each leaves a part {"type": modality,
    "placeholder": text}. placeholders: modality → the text that stands for an item; it has the
    modalities that the model takes. interleaves: a template that knows only text gets this text
    where the item was, and not before the texts of its message. A part may say its own path, for
    errors. Raises RequestError, which names the part, for other modalities and for parts of a wrong
    form."""
    sources: list[MediaSource] = []
    taken: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts = []
            for number, part in enumerate(content):
                kind = part.get("type") if isinstance(part, Mapping) else None
                modality = PARTS.get(kind) if isinstance(kind, str) else None
                if modality is None:
                    parts.append(part)
                    continue
                path = str(part.get("path", f"messages[{index}].content[{number}]"))[:100]
                if modality not in placeholders:
                    raise no_media(modality, path, placeholders)
                sources.append(_source(part, modality, path))
                place = {"type": modality, "placeholder": placeholders[modality]}
                parts.append({**place, "interleaved": True} if interleaves else place)
            message = {**message, "content": parts}
        taken.append(message)
    return taken, sources


def no_media(modality: str, path: str, modalities: Iterable[str]) -> RequestError:
    """Return the error for an item that the model does not take. modalities: those that it does."""
    taken = ", ".join(["text", *modalities])
    reason = f"{path}: this model takes {taken} only, got an item of type {modality}"
    return RequestError(reason, parameter=path)


def _source(part: Mapping[str, Any], modality: str, path: str) -> MediaSource:
    kind = part["type"]
    value = part.get(kind)
    uuid = part.get("uuid")
    if uuid is not None and (not isinstance(uuid, str) or not uuid):
        raise MalformedRequest(f"{path}: uuid must be a string, got {brief(uuid)}", parameter=path)
    if value is None and uuid is not None:  # the item is known
        return MediaSource(modality=modality, value=None, uuid=uuid, path=path)
    if kind.endswith("_embeds"):
        value = given_item(value, modality, f"{path}.{kind}")
        return MediaSource(modality=modality, value=value, uuid=uuid, path=path)
    if kind == "input_audio":
        value = _audio(value, path)
    elif kind.endswith("_url"):
        value = value.get("url") if isinstance(value, Mapping) else value
        if not isinstance(value, str) or not value:
            expected = f"{kind} must be {{'url': …}}, got {brief(part.get(kind))}"
            raise MalformedRequest(f"{path}: {expected}", parameter=path)
    return MediaSource(modality=modality, value=value, uuid=uuid, path=path)


def _audio(value: Any, path: str) -> str:
    """Return the URL of an audio file in OpenAI's form {"data": base64, "format": name}."""
    data = value.get("data") if isinstance(value, Mapping) else None
    if not isinstance(data, str) or not data:
        expected = f"input_audio must be {{'data': base64, 'format': 'wav'}}, got {brief(value)}"
        raise MalformedRequest(f"{path}: {expected}", parameter=path)
    return f"data:audio/{value.get('format') or 'wav'};base64,{data}"
