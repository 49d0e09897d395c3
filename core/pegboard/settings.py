"""Makes `Settings` from what a program was given: keyword arguments, a config file, the command line. Later ones win.

A config file is TOML or YAML. It holds engine and server settings by name, at the top level or under `engine:`/`server:`,
plugin rules under `plugins:`, and options of plugins under their kind: `attention: {triton: {num_splits: 4}}`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegboard.config import SECTIONS, EngineConfig, PluginConfig, ServerConfig, Settings, build, check_engine, settings_of
from pegboard.errors import ConfigError

Layer = dict[str, dict[str, Any]]
"""One source of settings: section → field → value; `plugins` may hold `options` by "kind.name"."""


def engine_settings(model: str | None, values: Mapping[str, Any]) -> Settings:
    """Settings of `LLM(model, **values)`: engine fields, and `plugin_options={"kind.name": {field: value}}`.
    Raises ConfigError that names an unknown or wrong one."""
    given = dict(values)
    options = given.pop("plugin_options", None) or {}
    if model is not None:
        given["model"] = model
    return settings_from([({"engine": given, "plugins": {"options": options}}, "the arguments")])


def settings_from(layers: list[tuple[Layer, str]]) -> Settings:
    """Merge layers, the last one strongest; every value remembers its layer's name. Raises ConfigError."""
    merged: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    sources: dict[str, str] = {}
    for layer, source in layers:
        for section, values in layer.items():
            for name, value in values.items():
                if section == "plugins" and name == "options":
                    _merge_options(merged["plugins"].setdefault("options", {}), value)
                else:
                    merged[section][name] = value
                sources[name] = source
        _check_layer(layer, source)
    everything = " and ".join(dict.fromkeys(sources.values())) or "defaults"
    settings = Settings(
        build(EngineConfig, merged["engine"], everything),
        build(ServerConfig, merged["server"], everything),
        build(PluginConfig, merged["plugins"], everything),
        sources,
    )
    check_engine(settings.engine)
    return settings


def _check_layer(layer: Layer, source: str) -> None:
    """Judge a layer by itself, so that an error names the right source."""
    for section, values in layer.items():
        build(SECTIONS[section], values, source)


def _merge_options(merged: dict[str, dict[str, Any]], more: Mapping[str, Mapping[str, Any]]) -> None:
    for address, values in more.items():
        merged.setdefault(address, {}).update(values)


def read_config_file(path: Path) -> Layer:
    """The layer a TOML or YAML file describes. Raises ConfigError naming the file."""
    content = _parse(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: expected settings by name, found {type(content).__name__}")
    layer: Layer = {section: {} for section in SECTIONS}
    for key, value in content.items():
        _place(layer, str(key).replace("-", "_"), value, path)
    return layer


def _place(layer: Layer, key: str, value: Any, path: Path) -> None:
    from pegboard.interfaces import KINDS

    homes = {setting.name: section for section in ("engine", "server") for setting in settings_of(section)}
    if key in SECTIONS and isinstance(value, Mapping):
        layer[key].update({str(name).replace("-", "_"): item for name, item in value.items()})
    elif key in homes:
        layer[homes[key]][key] = value
    elif key in KINDS and isinstance(value, Mapping) and all(isinstance(item, Mapping) for item in value.values()):
        options = layer["plugins"].setdefault("options", {})
        _merge_options(options, {f"{key}.{name}": item for name, item in value.items()})
    else:
        near = difflib.get_close_matches(key, [*homes, *SECTIONS, *KINDS], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{path}: unknown setting {key!r}{hint}")


def _parse(path: Path) -> Any:
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"config file {path}: {error.strerror or error}") from error
    if path.suffix == ".toml":
        import tomllib

        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"config file {path}: {error}") from error
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"config file {path}: expected a name that ends in .toml, .yaml or .yml")
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(f"config file {path}: reading YAML needs pyyaml (pip install pyyaml); TOML works without") from error
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path}: {error}") from error
