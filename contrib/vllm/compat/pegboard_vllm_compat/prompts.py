"""The forms of prompts that scripts import from `vllm.inputs`. Pegboard takes all of them as plain
mappings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class _Media(TypedDict, total=False):
    multi_modal_data: Mapping[str, Any]
    mm_processor_kwargs: Mapping[str, Any]
    multi_modal_uuids: Mapping[str, Any]
    cache_salt: str


class TextPrompt(_Media, total=False):
    """A prompt as text."""

    prompt: str


class TokensPrompt(_Media, total=False):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]
    prompt: str


class EmbedsPrompt(TypedDict, total=False):
    """A prompt as embeddings, a tensor [tokens, width]."""

    prompt_embeds: Any
    cache_salt: str


SingletonPrompt = str | TextPrompt | TokensPrompt | EmbedsPrompt
PromptType = SingletonPrompt | Mapping[str, Any]
