"""vLLM's settings that have another name or another form in Pegboard, or that Pegboard refuses with
a reason.

The names are data (`vllm_names.toml`). They are accepted wherever settings are given: flags, config
files, `LLM(...)`. A setting that would have no effect is refused, unless its value asks for what
Pegboard does anyway (`--nnodes 1`). vLLM's environment variables are data too: some are settings
here, and a warning names each other one that is set.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from pegboard.errors import ConfigError
from pegboard.log import get_logger

log = get_logger(__name__)

Layer = dict[str, dict[str, Any]]
ANY = "*"
"""In `agrees`: every value has no effect."""


@dataclass(frozen=True, slots=True)
class Form:
    """A vLLM setting that sets other settings of Pegboard, as `rule` says (see the data file).
    type: dict, bool, or object for a value that `rule` lists or hands on."""

    type: type
    help: str
    rule: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Absent:
    """A vLLM setting that has no effect in Pegboard. agrees: the values, as text, that ask for what
    Pegboard does anyway. warns: other values are accepted with a warning, because vLLM accepts them
    without an effect."""

    message: str
    kind: str
    agrees: tuple[str, ...]
    is_flag: bool
    warns: bool

    @property
    def reason(self) -> str:
        """Why the setting has no effect."""
        return (
            self.message
            or f"no installed plugin of kind {self.kind!r} takes it (see pegboard plugins list)"
        )


def _absent(groups: list[dict[str, Any]]) -> Iterator[tuple[str, Absent]]:
    for group in groups:
        message = group.get("reason", "")
        kind = group.get("kind", "")
        warns = group.get("warns", False)
        for name in group.get("switches", ()):
            yield (
                name,
                Absent(message, kind, (str(group.get(("agrees"), False)).lower(),), True, warns),
            )
        for name, agrees in group.get("values", {}).items():
            yield (
                name,
                Absent(message, kind, tuple(agrees.split("|")) if agrees else (), False, warns),
            )


def _type(rule: Mapping[str, Any]) -> type:
    return dict if "plugin" in rule else object if "values" in rule or "option" in rule else bool


_FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
ALIASES: Mapping[str, str] = _FILE["aliases"]
SHORT: Mapping[str, str] = {name: letters for letters, name in _FILE["short"].items()}
FORMS = {name: Form(_type(rule), rule["help"], rule) for name, rule in _FILE["forms"].items()}
ABSENT = dict(_absent(_FILE["absent"]))
ENVIRONMENT: Mapping[str, Any] = _FILE["environment"]


def our_name(setting: str, name: str | None) -> str | None:
    """Return what we call the value of a setting that vLLM calls `name`: the plugin, or the name
    itself. setting: load_format, attention_backend, dtype or kv_cache_dtype. Raises ConfigError if
    Pegboard has none."""
    if (reason := _FILE.get(f"no_{setting}s", {}).get(name)) is not None:
        raise ConfigError(f"{setting} {name}: {reason}")
    return _FILE[setting.removeprefix("kv_cache_") + "s"].get(name, name)


def quantization_for(load_format: str, asked: str | None) -> str | None:
    """Return the quantization that a load format of vLLM stands for, or `asked`. Raises ConfigError
    if they differ."""
    implied: str | None = _FILE["quantizing_load_formats"].get(load_format, asked)
    if asked not in (None, implied):
        raise ConfigError(f"load_format {load_format} quantizes with {implied}, not with {asked}")
    return implied


def refuse(name: str, value: Any, alias: str | None = None) -> None:
    """Raise ConfigError for a name in `ABSENT`, unless the value asks for what Pegboard does
    anyway. alias: the name as the user typed it."""
    absent = ABSENT[name]
    parts = list(value.values()) if isinstance(value, Mapping) and value else [value]
    if (
        value is None
        or all(_text(part) in absent.agrees for part in parts)
        or (not value and "{}" in absent.agrees)
    ):
        return
    agreeing = (
        f" (only {' or '.join(absent.agrees)})" if absent.agrees and not absent.is_flag else ""
    )
    typed = f"{alias or name} {value}" if not absent.is_flag else alias or name
    if absent.warns:
        warn_once(f"{name} {value} has no effect: {absent.reason}")
        return
    raise ConfigError(f"{typed} has no effect in Pegboard{agreeing}: {absent.reason}")


def _text(value: Any) -> str:
    return str(value).strip("'\"").lower()


def translate(name: str, value: Any, known: Mapping[str, Any]) -> Layer:
    """Translate the vLLM setting `name`, one of `FORMS`, to a layer. known: the engine settings so
    far. Raises ConfigError."""
    form = FORMS[name]
    if address := form.rule.get("option"):
        plugin, _, option = address.rpartition(".")
        kind, _, named = plugin.partition(".")
        options = {"options": {plugin: {option: value}}}
        if setting := form.rule.get("sets"):
            return {"engine": {setting: [named]}, "plugins": options}
        return {"plugins": {"enable": [f"{kind}:{named}"], **options}}
    if form.type is object:
        return _listed(name, value, form.rule)
    if form.type is dict and isinstance(value, Mapping):
        return _plugin_layer(name, value, form.rule)
    if form.type is dict or not isinstance(value, bool):
        raise ConfigError(
            f"{name} must be {'a mapping' if form.type is dict else 'true or false'}, got {value!r}"
        )
    if value and (least := form.rule.get("at_least")):
        return {
            "engine": {
                field: number for field, number in least.items() if (known.get(field) or 0) < number
            }
        }
    layer: Layer = form.rule[str(value).lower()]
    return layer


def _listed(name: str, value: Any, rule: Mapping[str, Any]) -> Layer:
    """Return the settings of a value that the rule lists, or of a mapping whose values it lists.
    Those of later `keys` win."""
    by_value = {text: layer for texts, layer in rule["values"].items() for text in texts.split("|")}
    keys: Sequence[str] = rule.get("keys", ())
    parts = dict(value) if isinstance(value, Mapping) and keys else {"": value}
    listed = [
        by_value.get(_text(part)) if key in ("", *keys) else None for key, part in parts.items()
    ]
    if None in listed:
        raise ConfigError(f"{name}: expected {', '.join(by_value)}, got {value!r}; {rule['help']}")
    layers = [by_value[_text(parts[key])] for key in ("", *keys) if key in parts]
    engine = {field: item for layer in layers for field, item in layer.get("engine", {}).items()}
    return {**layers[-1], "engine": engine} if engine else layers[-1] if layers else {}


@cache
def warn_once(message: str) -> None:
    """Log a warning, once per process."""
    log.warning("%s", message)


def _plugin_layer(name: str, value: Mapping[str, Any], rule: Mapping[str, Any]) -> Layer:
    """Return the settings and options that a mapping about one plugin stands for."""
    switch = rule.get("switch")
    if not isinstance(is_on := value.get(switch or "", switch is None), bool):
        raise ConfigError(f"{name}: expected true or false for {switch}, got {is_on!r}")
    plugin = value.get(rule["plugin"]) or rule.get("default")
    if not is_on or ("nothing" in rule and plugin == rule["nothing"]):
        return {"plugins": {"enable": []}}
    unnamed = rule.get("unnamed", "")
    if not isinstance(plugin, str | None if value.get(unnamed) else str) or plugin == "":
        raise ConfigError(f"{name} needs {rule['plugin']!r}, the name of a plugin; got {plugin!r}")
    value = _without_agreeing(name, value, rule)
    if plugin == rule.get("chain", ""):
        return _chain_layer(name, value, rule)
    settings: Mapping[str, str] = rule.get("settings", {})
    known = [
        key
        for key in (rule["plugin"], rule.get("role"), rule.get("options"), switch, *settings)
        if key
    ]
    options = {key: item for key, item in value.items() if key not in known}
    if "options" in rule:
        if options:
            raise ConfigError(
                f"{name}: {next(iter(options))!r} does not exist here; expected {', '.join(known)}"
            )
        options = dict(value.get(rule["options"]) or {})
    if (role := value.get(rule.get("role", ""))) not in (None, rule.get("any_role")):
        options["role"] = role
    if options and plugin is None:
        raise ConfigError(
            f"{name}: {next(iter(options))!r} is an option of a plugin; name it with "
            f"{rule['plugin']!r}"
        )
    plugins: dict[str, Any] = {"options": {f"{rule['kind']}.{plugin}": options}} if options else {}
    if "sets" not in rule:
        return {"plugins": {"enable": [f"{rule['kind']}:{plugin}"], **plugins}}
    engine: dict[str, Any] = {}
    if plugin is not None:
        engine[rule["sets"]] = [plugin] if rule.get("in_list") else plugin
    engine |= {ours: value[key] for key, ours in settings.items() if value.get(key) is not None}
    return {"engine": engine, **({"plugins": plugins} if plugins else {})}


def _without_agreeing(
    name: str, value: Mapping[str, Any], rule: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the mapping without the keys that have no effect. Raises ConfigError if a value asks
    for one."""
    rest = dict(value)
    for key, texts in rule.get("agrees", {}).items():
        given = rest.pop(key, None)
        agreeing = texts.split("|")
        if given is not None and texts != ANY and _text(given) not in agreeing:
            reason = rule.get("reasons", {}).get(key, "")
            raise ConfigError(
                f"{name}: {key} {given} has no effect in Pegboard (only {' or '.join(agreeing)})"
                f"{reason and f': {reason}'}"
            )
    return rest


def _chain_layer(name: str, value: Mapping[str, Any], rule: Mapping[str, Any]) -> Layer:
    """Return the settings and options of a mapping that contains several plugins, each in the form
    of a mapping about one. The second use of a plugin is called "NAME@2"."""
    options = value.get(rule["options"])
    parts = options.get(rule["parts"]) if isinstance(options, Mapping) else None
    if (
        not isinstance(parts, Sequence)
        or not parts
        or not all(isinstance(part, Mapping) for part in parts)
    ):
        place = f"{rule['options']}.{rule['parts']}"
        raise ConfigError(
            f"{name}: {rule['chain']} needs {place}, a list of mappings; got {parts!r:.60}"
        )
    engine: dict[str, Any] = {
        ours: value[key] for key, ours in rule["settings"].items() if value.get(key) is not None
    }
    names: list[str] = []
    plugins: dict[str, Any] = {}
    for layer in (_plugin_layer(name, {rule["plugin"]: None, **part}, rule) for part in parts):
        given = layer.get("plugins", {}).get("options", {})
        for plugin in layer["engine"].pop(rule["sets"]):
            number = next(n for n in count(1) if _numbered(plugin, n) not in names)
            names.append(_numbered(plugin, number))
            if (address := f"{rule['kind']}.{plugin}") in given:
                plugins[f"{rule['kind']}.{names[-1]}"] = given[address]
        engine |= layer["engine"]
    engine[rule["sets"]] = names
    return {"engine": engine, **({"plugins": {"options": plugins}} if plugins else {})}


def _numbered(plugin: str, number: int) -> str:
    """Return the name of the n-th use of a plugin in a chain."""
    return plugin if number == 1 else f"{plugin}@{number}"
