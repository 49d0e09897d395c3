"""The resolved set of plugins as one frozen value. The parent resolves once; children get this and never scan again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pegboard.errors import ConfigError
from pegboard.plugins.discovery import Entry
from pegboard.plugins.policy import OptionKey, PluginPolicy

FORMAT = 1


@dataclass(frozen=True, slots=True)
class LockedDecision:
    """What won for (kind, key) under `need` (its text form); `winner` is the qualified name, None = nothing suited."""

    kind: str
    key: str
    need: str
    winner: str | None
    rank: str = ""


@dataclass(frozen=True, slots=True)
class PluginLock:
    """entries, hooks: all usable ones, also those the policy blocks. options: raw values per plugin, with those of the
    environment merged in, so that a child reads no environment variable. Options may hold secrets: send, never log."""

    entries: tuple[Entry, ...]
    hooks: tuple[Entry, ...]
    policy: PluginPolicy
    options: Mapping[OptionKey, Mapping[str, Any]] = field(default_factory=dict)
    decisions: tuple[LockedDecision, ...] = ()

    def to_json(self) -> str:
        """Canonical JSON: equal locks give equal text. Raises ConfigError when an option's value is not JSON."""
        policy = asdict(self.policy) | {"options": _options_to_json(self.policy.options)}
        value = {
            "format": FORMAT,
            "entries": [asdict(entry) for entry in self.entries],
            "hooks": [asdict(entry) for entry in self.hooks],
            "policy": policy,
            "options": _options_to_json(self.options),
            "decisions": [asdict(decision) for decision in self.decisions],
        }
        try:
            return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        except TypeError as error:
            raise ConfigError(f"an option of a plugin is not plain data (numbers, text, lists, mappings): {error}") from error

    @classmethod
    def from_json(cls, text: str) -> PluginLock:
        """The lock `to_json` wrote. Raises ConfigError for another format."""
        value = json.loads(text)
        if value.get("format") != FORMAT:
            message = f"plugin lock has format {value.get('format')!r}, expected {FORMAT}"
            raise ConfigError(f"{message}: both ends need the same pegboard")
        policy: dict[str, Any] = {name: tuple(item) if isinstance(item, list) else item for name, item in value["policy"].items()}
        policy["options"] = _options_from_json(value["policy"]["options"])
        return cls(
            entries=tuple(Entry(**entry) for entry in value["entries"]),
            hooks=tuple(Entry(**entry) for entry in value["hooks"]),
            policy=PluginPolicy(**policy),
            options=_options_from_json(value["options"]),
            decisions=tuple(LockedDecision(**decision) for decision in value["decisions"]),
        )


def _options_to_json(options: Mapping[OptionKey, Mapping[str, Any]]) -> list[list[Any]]:
    return [[kind, name, dict(values)] for (kind, name), values in sorted(options.items())]


def _options_from_json(rows: list[list[Any]]) -> dict[OptionKey, dict[str, Any]]:
    return {(kind, name): values for kind, name, values in rows}
