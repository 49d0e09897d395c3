"""Flags from declared settings: the command line knows no setting by name.

`_` and `-` are the same in flag names. Options of plugins are `--kind.name.field value`; one value inside a mapping is
`--setting.key value`. Numbers may be written 4k (4000) or 4K (4096). Precedence: command line, --config file,
PEGBOARD_CONFIG file, default.
"""

from __future__ import annotations

import argparse
import json
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from pegboard import env
from pegboard.config import Setting, Settings, settings_of
from pegboard.errors import ConfigError
from pegboard.interfaces import KINDS
from pegboard.plugins.names import did_you_mean
from pegboard.settings import Layer, read_config_file, settings_from

SHORT = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "quantization": "-q"}
COMMAND_LINE = "the command line"

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class UsageError(ConfigError):
    """The command line itself is wrong."""


class FlagParser(argparse.ArgumentParser):
    """argparse with our rules: no abbreviations, `_` like `-`, errors as `UsageError`, the nearest flag in them."""

    def __init__(self, **more: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The namespace; raises UsageError for anything unknown."""
        arguments, unknown = self.parse_known_args([_dashed(word) for word in argv])
        for word in unknown:
            if word.startswith("-"):
                name = word.partition("=")[0]
                raise UsageError(f"unknown flag {name}{did_you_mean(name, self._option_string_actions)}")
        if unknown:
            raise UsageError(f"unexpected argument {unknown[0]!r} (see {self.prog} --help)")
        return arguments


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def add_settings(parser: argparse.ArgumentParser, section: str) -> None:
    """One flag per setting of a section; what is not given does not appear in the namespace."""
    group = parser.add_argument_group(f"{section} settings")
    for setting in settings_of(section):
        if section == "plugins" and setting.name == "options":
            continue
        prefix = "plugins-" if section == "plugins" else ""
        names = [f"--{prefix}{setting.name.replace('_', '-')}"]
        names += [SHORT[setting.name]] if setting.name in SHORT else []
        group.add_argument(
            *names, dest=f"{section}.{setting.name}", default=argparse.SUPPRESS, help=_help(setting), **_form(setting.type)
        )


def _help(setting: Setting) -> str:
    text = setting.help.replace("%", "%%")
    if setting.default in (None, [], {}) or isinstance(setting.default, bool):
        return text
    return f"{text} (default {setting.default})"


def _form(annotation: Any) -> dict[str, Any]:
    """argparse arguments for a type."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    origin = get_origin(annotation) or annotation
    if origin is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is Literal:
        return {"choices": get_args(annotation)}
    if origin is list:
        return {"nargs": "+", "action": "extend", "metavar": "NAME"}
    if origin is dict:
        return {"type": _json_mapping, "metavar": "JSON"}
    parse = {int: number, float: float, str: str}[origin]
    return {"type": parse, "metavar": {int: "N", float: "X", str: "TEXT"}[origin]}


def number(text: str) -> int:
    """An integer, also as 4k (4000), 4K (4096), 25.6k."""
    unit = _UNITS.get(text[-1:])
    try:
        if unit is None:
            return int(text)
        value = float(text[:-1]) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; expected one like 4096, 4k or 4K") from None
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(value)


def _json_mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object; expected one like '{{\"key\": 1}}'")
    return value


def layer_of(arguments: argparse.Namespace, dotted: Iterable[tuple[str, str]] = ()) -> Layer:
    """The settings that were given on the command line, by section."""
    layer: Layer = {}
    for dest, value in vars(arguments).items():
        section, dot, name = dest.partition(".")
        if dot:
            layer.setdefault(section, {})[name] = value
    for path, value in dotted:
        _place_dotted(layer, path, value)
    return layer


def split_dotted(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Take `--a.b.c value` and `--a.b.c=value` out of the words; (the rest, [("a.b.c", "value")])."""
    rest: list[str] = []
    dotted: list[tuple[str, str]] = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if not (word.startswith("--") and "." in name):
            rest.append(word)
            continue
        if not equals:
            value = next(words, "--")
            if value.startswith("--"):
                raise UsageError(f"{name} needs a value")
        dotted.append((name.removeprefix("--"), value))
    return rest, dotted


def _place_dotted(layer: Layer, path: str, value: str) -> None:
    head, *middle, last = path.split(".")
    head = head.replace("-", "_")
    mappings = {setting.name for setting in settings_of("engine") if _form(setting.type).get("type") is _json_mapping}
    if head in mappings:
        target = layer.setdefault("engine", {}).setdefault(head, {})
        for key in middle:
            target = target.setdefault(key, {})
        target[last] = _json_or_text(value)
    elif head in KINDS and middle:
        options = layer.setdefault("plugins", {}).setdefault("options", {})
        options.setdefault(f"{head}.{'.'.join(middle)}", {})[last.replace("-", "_")] = value
    else:
        raise UsageError(f"unknown flag --{path}: expected --kind.name.field{did_you_mean(head, [*KINDS, *mappings])}")


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def config_layers(path: str | None) -> list[tuple[Layer, str]]:
    """Layers of the config files: PEGBOARD_CONFIG's, then the one given."""
    files = [file for file in (env.config_file(), Path(path).expanduser() if path else None) if file is not None]
    return [(read_config_file(file), str(file)) for file in files]


def parse_settings(parser: FlagParser, argv: Sequence[str]) -> tuple[Settings, argparse.Namespace]:
    """Settings from files and flags. The parser may have a positional `model`. Raises ConfigError."""
    rest, dotted = split_dotted(argv)
    arguments = parser.parse(rest)
    layer = layer_of(arguments, dotted)
    model = getattr(arguments, "model", None)
    if model is not None:
        flag = layer.setdefault("engine", {}).setdefault("model", model)
        if flag != model:
            raise UsageError(f"two models: {model!r} and --model {flag!r}")
    return settings_from([*config_layers(arguments.config), (layer, COMMAND_LINE)]), arguments
