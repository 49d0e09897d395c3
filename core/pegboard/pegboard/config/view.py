"""Settings as an operator may see them over HTTP: plain data, secrets hidden."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from pegboard.config.schema import SECTIONS, Settings

HIDDEN = "***"
_SECRET = re.compile(r"(^|_)(api_)?(key|token|secret|password)s?$")


def describe_settings(settings: Settings) -> dict[str, Any]:
    """{section: {setting: value}} and "sources": {setting: where its value came from}. Values named like a secret, at any depth,
    are shown as *** when they are set."""
    sections = {name: _hide(msgspec.to_builtins(getattr(settings, name))) for name in SECTIONS}
    return {**sections, "sources": dict(settings.sources)}


def _hide(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: HIDDEN if _SECRET.search(str(name).lower()) and item not in (None, [], "") else _hide(item)
            for name, item in value.items()
        }
    return [_hide(item) for item in value] if isinstance(value, list) else value
