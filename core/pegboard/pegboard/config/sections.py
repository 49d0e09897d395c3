"""The sections of settings: the engine's, the rules about plugins, and those that distributions
bring.

A distribution declares the settings of a section as a struct (see `config.setting`) and names it in
its metadata: `[project.entry-points."pegboard.settings.v1"]`, `server =
"pegboard_server.settings:ServerConfig"`. A section whose settings cannot be used is left out with a
warning. Rules about plugins do not apply to sections, because a section may be needed to read them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache

import msgspec

from pegboard.config.schema import EngineConfig, PluginConfig
from pegboard.config.setting import Setting, settings_in
from pegboard.installed import SETTINGS_GROUP, Entry, installed
from pegboard.log import get_logger

log = get_logger(__name__)

CORE: Mapping[str, type[msgspec.Struct]] = {"engine": EngineConfig, "plugins": PluginConfig}


@cache
def sections() -> Mapping[str, type[msgspec.Struct]]:
    """Return the struct of each section."""
    known = dict(CORE)
    for entry in installed().entries:
        if entry.group == SETTINGS_GROUP:
            try:
                known[entry.name] = _section(entry, known)
            except Exception as error:  # noqa: BLE001 - of another distribution
                log.warning(
                    "the settings %r of %s %s cannot be used: %s",
                    entry.name,
                    entry.distribution,
                    entry.version,
                    error,
                )
    return known


def _section(entry: Entry, known: Mapping[str, type[msgspec.Struct]]) -> type[msgspec.Struct]:
    module, _, name = entry.value.partition(":")
    cls: type[msgspec.Struct] = getattr(importlib.import_module(module), name)
    taken = {setting.name for each in known for setting in settings_in(known[each], each)}
    if entry.name in known or taken & {one.name for one in settings_in(cls, entry.name)}:
        raise ValueError("a section or a setting of that name exists already")
    return cls


def settings_of(section: str) -> tuple[Setting, ...]:
    """Return all settings of a section in declaration order."""
    return settings_in(sections()[section], section)


@cache
def all_settings() -> Mapping[str, Setting]:
    """Return the settings of all sections by name."""
    return {setting.name: setting for section in sections() for setting in settings_of(section)}
