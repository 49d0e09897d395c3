"""Flags from declared settings: the command line knows no setting by name.

`_` and `-` are the same in flag names. Numbers may be written 4k (4000) or 4K (4096), lists as words or as one JSON list. vLLM's
own names are understood as `pegboard.config.vllm_names` says. Precedence: command line, --config file, PEGBOARD_CONFIG file,
default.
"""

from __future__ import annotations

import argparse
import json
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from pegboard import env
from pegboard.cli.dotted import place_dotted, split_dotted
from pegboard.cli.usage import UsageError
from pegboard.config.schema import Setting, Settings, settings_of
from pegboard.config.sources import VLLM, is_vllm_name, parse_number, read_config_file, settings_from
from pegboard.config.vllm_names import ABSENT, ALIASES, FORMS, Layer, refuse
from pegboard.errors import ConfigError
from pegboard.plugins.names import did_you_mean

SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "quantization": "-q",
    "api_server_count": "-asc",
    "speculative_config": "-sc",
    "compilation_config": "-cc",
    "attention_config": "-ac",
}
COMMAND_LINE = "the command line"

_SHORT_OF_ABSENT = {
    "-dp": "--data-parallel-size", "-dpn": "--data-parallel-rank", "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local", "-dpa": "--data-parallel-address", "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend", "-dph": "--data-parallel-hybrid-lb", "-dpe": "--data-parallel-external-lb",
    "-ep": "--enable-expert-parallel", "-dcp": "--decode-context-parallel-size", "-pcp": "--prefill-context-parallel-size",
    "-n": "--nnodes", "-r": "--node-rank",
}  # fmt: skip


class FlagParser(argparse.ArgumentParser):
    """argparse with our rules: no abbreviations, `_` like `-`, errors as `UsageError`, the nearest flag in them."""

    def __init__(self, **more: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The namespace; raises UsageError for anything unknown, before it misses what a mistyped flag should have brought."""
        words = [_dashed(word) for word in argv]
        self._refuse_unknown(word for word in words if word.startswith("--") and word != "--" and " " not in word)
        arguments, unknown = self.parse_known_args(words)
        self._refuse_unknown(word for word in unknown if word.startswith("-"))
        if unknown:
            raise UsageError(f"unexpected argument {unknown[0]!r} (see {self.prog} --help)")
        return arguments

    def _refuse_unknown(self, flags: Iterable[str]) -> None:
        known = set(self.flags)
        for word in flags:
            name = word.partition("=")[0]
            if name not in known:
                raise UsageError(f"unknown flag {name}{did_you_mean(name, known)}")

    @property
    def flags(self) -> Iterable[str]:
        """Every flag that exists, those of sub-commands included."""
        yield from self._option_string_actions
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser.flags


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def add_settings(parser: argparse.ArgumentParser, section: str, *, only: Iterable[str] | None = None) -> None:
    """One flag per setting of a section (or `only` some); what is not given does not appear in the namespace."""
    group = parser.add_argument_group(f"{section} settings")
    for setting in settings_of(section):
        if (section == "plugins" and setting.name == "options") or (only is not None and setting.name not in only):
            continue
        prefix = "plugins-" if section == "plugins" else ""
        names = [f"--{prefix}{setting.name.replace('_', '-')}"]
        names += [f"--{theirs.replace('_', '-')}" for theirs, ours in ALIASES.items() if ours == setting.name]
        names += [SHORT[setting.name]] if setting.name in SHORT else []
        group.add_argument(
            *names, dest=f"{section}.{setting.name}", default=argparse.SUPPRESS, help=_help(setting), **_form(setting.type)
        )


def add_vllm_forms(parser: argparse.ArgumentParser) -> None:
    """vLLM's flags that say in another form what settings say here."""
    group = parser.add_argument_group("vllm forms")
    for name, form in FORMS.items():
        if is_vllm_name(name):
            names = [f"--{name.replace('_', '-')}", *([SHORT[name]] if name in SHORT else [])]
            group.add_argument(*names, dest=f"{VLLM}.{name}", default=argparse.SUPPRESS, help=form.help, **_form(form.type))


def _help(setting: Setting) -> str:
    text = setting.help.replace("%", "%%")
    if setting.default in (None, [], {}) or isinstance(setting.default, bool):
        return text
    shown = " ".join(setting.default) if isinstance(setting.default, list) else setting.default
    return f"{text} (default {shown})"


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
    try:
        return parse_number(text)
    except ValueError as error:
        told = str(error) if "whole" in str(error) else f"{text!r} is no number; expected one like 4096, 4k or 4K"
        raise argparse.ArgumentTypeError(told) from None


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
            layer.setdefault(section, {})[name] = _flat(dest, value) if isinstance(value, list) else value
    mappings = {setting.name: "engine" for setting in settings_of("engine") if _form(setting.type).get("type") is _json_mapping}
    mappings |= {name: VLLM for name, form in FORMS.items() if form.type is dict}
    for path, value in dotted:
        place_dotted(layer, path, value, mappings)
    return layer


def _flat(dest: str, items: list[Any]) -> list[Any]:
    """Words, where one that is a JSON list stands for its items."""
    flat: list[Any] = []
    for item in items:
        if not (isinstance(item, str) and item.startswith("[")):
            flat.append(item)
            continue
        try:
            flat += json.loads(item)
        except ValueError as error:
            raise UsageError(f"--{dest.partition('.')[2].replace('_', '-')}: {item!r} is no JSON list: {error}") from None
    return flat


def config_layers(path: str | None) -> list[tuple[Layer, str]]:
    """Layers of the config files: PEGBOARD_CONFIG's, then the one given."""
    files = [file for file in (env.config_file(), Path(path).expanduser() if path else None) if file is not None]
    return [(read_config_file(file), str(file)) for file in files]


def spelled_out(argv: Sequence[str]) -> list[str]:
    """vLLM's short forms in full: -cc.mode 0, -dp 2, -O3."""
    words = []
    for word in argv:
        if level := re.fullmatch(r"-O=?(\d)?", word):
            words += ["--optimization-level", *([level[1]] if level[1] else [])]
            continue
        short = re.match(r"-[a-z]+(?=[.=]|$)", word)
        if short and short[0] in _SHORT_OF_ABSENT:
            word = _SHORT_OF_ABSENT[short[0]] + word[short.end() :]
        elif short and word[short.end() :].startswith("."):
            long = {letters: f"--{name.replace('_', '-')}" for name, letters in SHORT.items()}
            word = long.get(short[0], short[0]) + word[short.end() :]
        words.append(word)
    return words


def take_absent(argv: Sequence[str]) -> list[str]:
    """The words without vLLM's flags that have nothing to act on. Raises UsageError, with the reason, where one asks for more
    than what happens anyway."""
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_").partition(".")[0]
        wanted = not (name.startswith("no_") and name.removeprefix("no_") in ABSENT)
        name = name if wanted else name.removeprefix("no_")
        if not flag.startswith("--") or name not in ABSENT or not is_vllm_name(name):
            rest.append(word)
            continue
        given: Any = value if equals else None
        if ABSENT[name].is_flag:
            given = wanted
        elif not equals:
            if not words or words[0].startswith("--"):
                raise UsageError(f"{flag} needs a value")
            given = words.pop(0)
        try:
            refuse(name, {flag: given} if "." in flag else given, flag)
        except ConfigError as error:
            raise UsageError(str(error)) from None
    return rest


def parse_settings(
    parser: FlagParser, argv: Sequence[str], below: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[Settings, argparse.Namespace]:
    """Settings from files and flags. The parser may have a positional `model`. below: the command's own defaults, weaker than
    files and flags. Raises ConfigError."""
    rest, dotted = split_dotted(take_absent(spelled_out(argv)))
    arguments = parser.parse(rest)
    layer = layer_of(arguments, dotted)
    model = getattr(arguments, "model", None)
    if model is not None:
        flag = layer.setdefault("engine", {}).setdefault("model", model)
        if flag != model:
            raise UsageError(f"two models: {model!r} and --model {flag!r}")
    own = [({section: dict(values) for section, values in below.items()}, parser.prog)] if below else []
    layers: list[tuple[Layer, str]] = [*own, *config_layers(arguments.config), (layer, COMMAND_LINE)]
    return settings_from(layers), arguments
