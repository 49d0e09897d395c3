"""The forms in which users write prompts: text, a list of token ids, {"prompt": text},
{"prompt_token_ids": [...]}, {"prompt_embeds": tensor}, {"prompt_token_ids": [...], "prompt_embeds":
{position: tensor}} (each with an optional "cache_salt"), or an `interfaces.api.Prompt`. Text and
ids may have placeholders for "multi_modal_data": {"image": one or several, …}. An encoder-decoder
model takes the decoder's prompt with this data, or {"encoder_prompt": {"prompt": "",
"multi_modal_data": …}, "decoder_prompt": a prompt without data}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pegboard.data.given_items import given_items
from pegboard.data.media import PARTS, MediaSource
from pegboard.data.prompt_embeds import PromptEmbeds, wrong_embeds
from pegboard.errors import RequestError
from pegboard.interfaces.api import Prompt

PromptInput = str | Sequence[int] | Mapping[str, Any] | Prompt

_MEDIA_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
ROWS = {kind: modality for kind, modality in PARTS.items() if kind.endswith("_embeds")}
"""Names under which multi_modal_data has the rows of items."""
_PARTS = ("encoder_prompt", "decoder_prompt")
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", *_MEDIA_KEYS)


def as_prompt(value: PromptInput) -> Prompt:
    """Convert any accepted form to a `Prompt`. Raises RequestError, which names what is wrong with
    the prompt."""
    if isinstance(value, Prompt):
        prompt = value
    elif isinstance(value, str):
        prompt = Prompt(text=value)
    elif isinstance(value, Mapping):
        prompt = _from_parts(value) if value.keys() & {*_PARTS} else _from_mapping(value)
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        prompt = Prompt(token_ids=value)  # type: ignore[arg-type]  # not a str: that case is above
    else:
        raise RequestError(
            f"prompt must be text, token ids or a mapping, got {type(value).__name__}",
            parameter="prompt",
        )
    if prompt.embeds:
        if prompt.text is not None:
            raise RequestError(
                "a prompt is either prompt_embeds, alone or beside token ids, or text; both were "
                "given",
                parameter="prompt_embeds",
            )
        return prompt
    if prompt.text is None and prompt.token_ids is None:
        raise RequestError("a prompt needs text or token ids", parameter="prompt")
    if prompt.text is not None and not isinstance(prompt.text, str):
        raise RequestError(
            f"prompt must be text, got {type(prompt.text).__name__}", parameter="prompt"
        )
    return prompt


def _from_mapping(value: Mapping[str, Any]) -> Prompt:
    fields = {key: item for key, item in value.items() if item is not None}
    unknown = [key for key in fields if key not in _PROMPT_KEYS]
    if unknown:
        raise RequestError(
            f"unknown prompt field {unknown[0]!r}; expected {', '.join(_PROMPT_KEYS)}",
            parameter=unknown[0],
        )
    text = fields.get("prompt")
    token_ids = fields.get("prompt_token_ids")
    embeds = _embeds(fields["prompt_embeds"], token_ids) if "prompt_embeds" in fields else ()
    salt = fields.get("cache_salt")
    return Prompt(
        text=text,
        token_ids=token_ids,
        cache_salt=salt,
        embeds=embeds,
        media=_media(fields.get("multi_modal_data"), fields.get("multi_modal_uuids")),
        media_options=_mapping(fields, "mm_processor_kwargs"),
    )


def _from_parts(value: Mapping[str, Any]) -> Prompt:
    """Return the prompt of an encoder-decoder model, whose two parts are given."""
    expected = f"a prompt with {' or '.join(_PARTS)} has both"
    if unknown := [key for key in value if key not in (*_PARTS, "mm_processor_kwargs")]:
        raise RequestError(f"{expected} and no {unknown[0]!r}", parameter=unknown[0])
    for part in _PARTS:
        if value.get(part) is None:
            raise RequestError(f"{expected}, and {part} is missing", parameter=part)
    encoder, decoder = (value[part] for part in _PARTS)
    if (
        not isinstance(encoder, Mapping)
        or encoder.get("prompt")
        or not _from_mapping(encoder).media
    ):
        raise RequestError(
            'encoder_prompt must be {"prompt": "", "multi_modal_data": …}: encoders take no text',
            parameter="encoder_prompt",
        )
    prompt = as_prompt(decoder)
    if prompt.media:
        raise RequestError("multi_modal_data goes into encoder_prompt", parameter="decoder_prompt")
    source = _from_mapping(encoder)
    options = {**source.media_options, **_mapping(value, "mm_processor_kwargs")}
    return replace(prompt, media=source.media, media_options=options)


def _mapping(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name) or {}
    if not isinstance(value, Mapping):
        expected = f"{name} must be a mapping, got {type(value).__name__}"
        raise RequestError(expected, parameter=name)
    return value


def _embeds(value: Any, token_ids: Any) -> list[PromptEmbeds]:
    """Return the rows of the whole prompt, or the spans of a prompt of token ids."""
    if token_ids is None:
        return [PromptEmbeds.of(value)]
    if not isinstance(value, Mapping) or not all(
        isinstance(start, int) and start >= 0 for start in value
    ):
        raise RequestError(
            "prompt_embeds beside prompt_token_ids must be {position of the first row: rows}",
            parameter="prompt_embeds",
        )
    return [PromptEmbeds.of(rows, start) for start, rows in sorted(value.items())]


def _is_video(modality: str, values: list[Any]) -> bool:
    """Return whether this list is not of videos, but of the frames of one: PIL images, or arrays
    with three dimensions."""
    known = str, bytes, bytearray, memoryview, tuple, list, Mapping, type(None)
    return bool(modality == "video" and values) and not any(
        isinstance(value, known) or getattr(value, "ndim", 3) != 3 for value in values
    )


def _is_rows(values: Any) -> bool:
    """Return whether this is a torch tensor of the rows of items, [items, rows, width]."""
    is_tensor = getattr(values, "ndim", 0) == 3 and hasattr(values, "is_floating_point")
    return is_tensor and bool(values.is_floating_point())


def _items(name: str, values: Any) -> list[Any]:
    """Return the items of multi_modal_data[name]."""
    path = f"multi_modal_data.{name}"
    has_rows = name in ROWS or _is_rows(values)
    is_list = isinstance(values, list) and not _is_video(name, values)
    if has_rows and not is_list and not isinstance(values, Mapping):
        if getattr(values, "ndim", 0) != 3:
            raise wrong_embeds(
                path,
                "expected a tensor [items, rows, width], a list with [rows, width] of each item, "
                "or a mapping with them and with what else the model needs of the items",
            )
        is_list = True
    items: list[Any] = []
    for value in values if is_list else [values]:
        is_given = has_rows or isinstance(value, Mapping)
        items += given_items(value, ROWS.get(name, name), path) if is_given else [value]
    return items


def _media(data: Any, uuids: Any) -> list[MediaSource]:
    """Return the items of a prompt. data: modality → an item or a list of items; None = it is known
    by its uuid. Rows of items are a tensor [items, rows, width], a list under image_embeds,
    audio_embeds or video_embeds, or a mapping (see `given_items`). uuids: a list, or that of the
    one item."""
    sources = []
    data = _mapping({"multi_modal_data": data}, "multi_modal_data")
    names = _mapping({"multi_modal_uuids": uuids}, "multi_modal_uuids")
    for name, values in data.items():
        modality = ROWS.get(name, name)
        items = _items(name, values)
        given = names.get(name)
        of_items = given if isinstance(given, list) else [given]
        if given is not None and len(of_items) != len(items):
            raise RequestError(
                f"multi_modal_uuids has {len(of_items)} names for {len(items)} items of type "
                f"{name}; give one for each",
                parameter="multi_modal_uuids",
            )
        of_items = of_items if given is not None else [None] * len(items)
        for index, (item, uuid) in enumerate(zip(items, of_items, strict=True)):
            path = f"multi_modal_data.{name}[{index}]"
            sources.append(MediaSource(modality=str(modality), value=item, uuid=uuid, path=path))
    return sources
