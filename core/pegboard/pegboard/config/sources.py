"""Makes `Settings` from a program's keyword arguments, config file and command line. Later sources
override earlier ones.

A config file is TOML or YAML. It holds engine and server settings by name, at the top level or
under `engine:` and `server:`. It holds plugin rules under `plugins:`, and the options of a plugin
under its kind: `attention: {triton: {num_splits: 4}}`. As in vLLM's files, a number may be written
as 4k, and a list with one item as that item. vLLM's own names (`config/vllm_names.py`) are accepted
everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec

from pegboard import env
from pegboard.config.schema import PluginConfig, Settings, check_engine
from pegboard.config.sections import CORE, all_settings, sections
from pegboard.config.setting import Setting, build
from pegboard.config.vllm_names import (
    ABSENT,
    ALIASES,
    ENVIRONMENT,
    FORMS,
    Layer,
    refuse,
    translate,
    warn_once,
)
from pegboard.errors import ConfigError, did_you_mean

VLLM = "vllm"
"""The section of a layer that holds settings under vLLM's names (`config/vllm_names.py`) until they
are translated. A layer is one source of settings: section → field → value. Its section `plugins`
may hold `options` by "kind.name"."""

HIDDEN = "***"
_SECRET = re.compile(r"(^|_)(api_)?(key|token|secret|password)s?$")
_UNITS = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}


def engine_settings(model: str | None, values: Mapping[str, Any]) -> Settings:
    """Return the settings of `LLM(model, **values)`: engine fields, `plugin_options={"kind.name":
    {field: value}}`, `plugin_files=["FILE.py"]`, and the other fields of `PluginConfig`, as
    `plugins_deny=["kind:name"]`. `logits_processors` may hold classes. Raises ConfigError, which
    names the field, if one is unknown or wrong."""
    settings = dict(values)
    files = settings.pop("plugin_files", None) or []
    files = [str(file) for file in ([files] if isinstance(files, str | Path) else files)]
    plugins = {"options": settings.pop("plugin_options", None) or {}, "files": files}
    plugins |= {
        name: settings.pop(f"plugins_{name}")
        for name in PluginConfig.__struct_fields__
        if f"plugins_{name}" in settings and name not in plugins
    }
    if isinstance(processors := settings.get("logits_processors"), list | tuple):
        settings["logits_processors"] = [
            _class_path(item) if isinstance(item, type) else item for item in processors
        ]
    if model is not None:
        settings["model"] = model
    theirs = {name: settings.pop(name) for name in list(settings) if is_vllm_name(name)}
    return settings_from(
        [({"engine": settings, "plugins": plugins, VLLM: theirs}, "the arguments")]
    )


def _class_path(processor: type) -> str:
    """Return "module:Class", by which every process finds the class. Raises ConfigError for a class
    inside a function."""
    path = f"{processor.__module__}:{processor.__qualname__}"
    if "<" in path:
        raise ConfigError(
            f"logits_processors: {path} is inside a function; define the class at the top level "
            "of a module"
        )
    return path


def is_vllm_name(name: str) -> bool:
    """Return whether `name` is one of vLLM's names and not also one of Pegboard's settings, which
    take precedence."""
    if name in ALIASES and ALIASES[name] not in all_settings():
        return False
    return (name in ALIASES or name in FORMS or name in ABSENT) and name not in all_settings()


def settings_from(layers: list[tuple[Layer, str]]) -> Settings:
    """Merge the layers; later ones override earlier ones. The name of a value's layer is recorded
    as its source. The weakest layers are vLLM's environment variables and then PEGBOARD_PLUGINS.
    Raises ConfigError."""
    if (allow := env.plugins_allowed()) is not None:
        layers = [({"plugins": {"allow": list(allow)}}, "PEGBOARD_PLUGINS"), *layers]
    layers = [*_environment_layers(), *layers]
    merged: dict[str, dict[str, Any]] = {section: {} for section in CORE}
    sources: dict[str, str] = {}
    for given, source in layers:
        layer = _translated(given, merged)
        for section, values in layer.items():
            target = merged.setdefault(section, {})
            for name, value in values.items():
                if section == "plugins" and name == "options":
                    _merge_options(target.setdefault("options", {}), value)
                else:
                    target[name] = value
                sources[name] = source
            # check each layer separately, so that an error names the right source
            build(_struct(section), values, source)
    everything = " and ".join(dict.fromkeys(sources.values())) or "defaults"
    built = {name: build(_struct(name), values, everything) for name, values in merged.items()}
    core: dict[str, Any] = {name: built.pop(name) for name in CORE}
    settings = Settings(**core, sections=built, sources=sources)
    check_engine(settings.engine)
    return settings


def _struct(section: str) -> type[msgspec.Struct]:
    """Return the struct of a section. Sections of other distributions are only imported if a source
    names them."""
    return CORE.get(section) or sections()[section]


def _environment_layers() -> Iterator[tuple[Layer, str]]:
    """Yield a layer for each of vLLM's environment variables that is a setting here. Warn once
    about every other one that is set, unless it asks for what Pegboard does anyway."""
    for name, value in env.vllm_variables().items():
        ((setting, form),) = ENVIRONMENT["sets"].get(name, {"": ""}).items()
        if setting and (home := all_settings().get(setting)):
            yield (
                {home.section: {setting: coerced(home, form.format(value))}},
                f"the environment variable {name}",
            )
        elif form := ENVIRONMENT["forms"].get(name):
            yield {VLLM: {form: value.lower() in ("1", "true")}}, f"the environment variable {name}"
        elif option := ENVIRONMENT["options"].get(name):
            address, _, field = option.rpartition(".")
            yield (
                {"plugins": {"options": {address: {field: value}}}},
                f"the environment variable {name}",
            )
        elif ENVIRONMENT["agrees"].get(name) not in ("*", value):
            hint = ENVIRONMENT["instead"].get(name)
            warn_once(
                f"the environment variable {name} has no effect in "
                f"Pegboard{f'; use {hint}' if hint else ''}"
            )


def _translated(layer: Layer, before: Layer) -> Layer:
    """Return the layer with vLLM's names translated. before: the values of earlier layers. Raises
    ConfigError if two names give different values for one setting."""
    result = {section: dict(values) for section, values in layer.items() if section != VLLM}
    for name, value in layer.get(VLLM, {}).items():
        if name in ALIASES:
            home = all_settings()[ALIASES[name]]
            settings: Layer = {home.section: {home.name: coerced(home, value)}}
        elif name in ABSENT:
            refuse(name, value)
            settings = {}
        else:
            settings = translate(name, value, {**before["engine"], **result.get("engine", {})})
        for section, values in settings.items():
            target = result.setdefault(section, {})
            for field, item in values.items():
                if section == "plugins" and isinstance(item, list):
                    target[field] = [
                        *(target.get(field) or before["plugins"].get(field) or []),
                        *item,
                    ]
                elif section == "plugins":
                    options = target["options"] = {
                        key: dict(kept) for key, kept in target.get("options", {}).items()
                    }
                    _merge_options(options, item)
                elif target.setdefault(field, item) != item:
                    raise ConfigError(
                        f"{name} means {field}={item!r}, but {field}={target[field]!r} was also "
                        "given"
                    )
    return result


def parse_number(text: str) -> int:
    """Parse an integer, which may have a unit: 4k (4000), 4K (4096), 25.6k. Raises ValueError."""
    unit = _UNITS.get(text[-1:])
    value = int(text) if unit is None else float(text[:-1]) * unit
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def coerced(setting: Setting, value: Any) -> Any:
    """Convert text to the type of the setting: "4k" to a number, "1" or "true" to True, a single
    item to a list. Return any other value unchanged."""
    kinds = {get_origin(part) or part for part in (*get_args(setting.type), setting.type)}
    if isinstance(value, str) and list in kinds:
        return [value]
    if isinstance(value, str) and bool in kinds:
        return {"1": True, "true": True, "0": False, "false": False}.get(value.lower(), value)
    if isinstance(value, str) and int in kinds and str not in kinds:
        try:
            return parse_number(value)
        except ValueError:
            return value
    return value


def _merge_options(
    merged: dict[str, dict[str, Any]], more: Mapping[str, Mapping[str, Any]]
) -> None:
    for address, values in more.items():
        merged.setdefault(address, {}).update(values)


def plugin_config() -> PluginConfig:
    """Return the plugin rules of the PEGBOARD_CONFIG file and of PEGBOARD_PLUGINS."""
    return settings_from(config_layers(None)).plugins


def config_layers(path: str | None) -> list[tuple[Layer, str]]:
    """Return the layers of the config files: first that of PEGBOARD_CONFIG, then that of `path`."""
    files = [
        file
        for file in (env.config_file(), Path(path).expanduser() if path else None)
        if file is not None
    ]
    return [(read_config_file(file), str(file)) for file in files]


def read_config_file(path: Path) -> Layer:
    """Read a TOML or YAML file as a layer. Raises ConfigError, which names the file."""
    content = _parse(path)
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: expected settings by name, found {type(content).__name__}")
    layer: Layer = {}
    for key, value in content.items():
        _place(layer, str(key).replace("-", "_"), value, path)
    return layer


def _place(layer: Layer, key: str, value: Any, path: Path) -> None:
    setting = all_settings().get(key)
    if key in sections() and isinstance(value, Mapping):
        values = {str(name).replace("-", "_"): item for name, item in value.items()}
        layer.setdefault(key, {}).update(values)
    elif setting is not None and setting.section != "plugins":
        layer.setdefault(setting.section, {})[key] = coerced(setting, value)
    elif is_vllm_name(key):
        layer.setdefault(VLLM, {})[key] = value
    elif (
        isinstance(value, Mapping)
        and value
        and all(isinstance(item, Mapping) for item in value.values())
    ):
        options = layer.setdefault("plugins", {}).setdefault("options", {})
        _merge_options(options, {f"{key}.{name}": item for name, item in value.items()})
    else:
        raise ConfigError(
            f"{path}: unknown setting {key!r}{did_you_mean(key, [*all_settings(), *sections()])}"
        )


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
        raise ConfigError(
            f"config file {path}: YAML needs pyyaml (pip install pyyaml); TOML does not"
        ) from error
    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"config file {path}: {error}") from error


def describe_settings(settings: Settings) -> dict[str, Any]:
    """Return {section: {setting: value}}, and under "sources" {setting: where its value came from}.
    A value whose name looks like that of a secret is shown as ***, at any depth."""
    structs = {"engine": settings.engine, "plugins": settings.plugins, **settings.sections}
    shown = {name: _hide(msgspec.to_builtins(struct)) for name, struct in structs.items()}
    return {**shown, "sources": dict(settings.sources)}


def _hide(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: HIDDEN
            if _SECRET.search(str(name).lower()) and item not in (None, [], "")
            else _hide(item)
            for name, item in value.items()
        }
    return [_hide(item) for item in value] if isinstance(value, list) else value
