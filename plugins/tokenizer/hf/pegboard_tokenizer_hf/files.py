"""Reads the files next to tokenizer.json: special tokens and chat templates.

tokenizer_config.json       names of special tokens, older chat templates
special_tokens_map.json     names of special tokens, if tokenizer_config.json has none
chat_template.jinja         the chat template; additional_chat_templates/<name>.jinja more of them
chat_template.json          {"chat_template": …}, as processors store it
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegboard.data.checkpoint_file import read_object, read_text
from pegboard.errors import ModelError
from pegboard_chat import named_templates

SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_optional(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, or {} if there is no such file. Raises ModelError if the
    file is damaged."""
    return read_object(path) if path.is_file() else {}


def special_tokens(directory: Path) -> tuple[dict[str, str], list[str]]:
    """Returns the named special tokens ({"eos_token": "</s>"}), and the other special tokens, which
    have no name."""
    values = read_optional(directory / "special_tokens_map.json") | read_optional(
        directory / "tokenizer_config.json"
    )
    named = {name: text for name in SPECIAL_NAMES if (text := _text(values.get(name))) is not None}
    extra = values.get("extra_special_tokens") or values.get("additional_special_tokens") or []
    if not isinstance(extra, Mapping | list):
        raise ModelError(
            f"{directory}: the extra special tokens are a JSON {type(extra).__name__}, expected a "
            "list or an object"
        )
    if isinstance(extra, Mapping):  # tokens with model-specific names, such as "image_token"
        named |= {name: text for name, value in extra.items() if (text := _text(value)) is not None}
        extra = []
    return named, [text for value in extra if (text := _text(value)) is not None]


def _text(token: object) -> str | None:
    """Returns the text of a token, which is written as a string or as an object with "content"."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def chat_templates(directory: Path) -> str | dict[str, str] | None:
    """Returns the checkpoint's chat template, or all of its named templates, or None if it has
    none."""
    paths = {"default": directory / "chat_template.jinja"}
    paths |= {
        path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))
    }
    sources = {name: read_text(path) for name, path in paths.items() if path.is_file()}
    if sources:
        return sources
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (entries := read_optional(directory / name).get("chat_template")) is not None:
            return named_templates(entries)
    return None
