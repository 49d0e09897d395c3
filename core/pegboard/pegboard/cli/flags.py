"""Creates flags from the declared settings; this file names no setting itself. `_` and `-` are the
same in flag names. Numbers may be written as 4k (4000) or 4K (4096), and lists as words or as one
JSON list. vLLM's own names are translated by `pegboard.config.vllm_names`. The command line
overrides the --config file, which overrides the PEGBOARD_CONFIG file, which overrides the defaults.
`--kind.name.field VALUE` sets an option of a plugin. `--setting.key VALUE` sets one value of a
setting that is a mapping.
"""

from __future__ import annotations

import argparse
import json
import re
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from pegboard.config.schema import Settings
from pegboard.config.sections import settings_of
from pegboard.config.setting import Setting
from pegboard.config.sources import VLLM, config_layers, is_vllm_name, parse_number, settings_from
from pegboard.config.vllm_names import ABSENT, ALIASES, FORMS, SHORT, Layer, refuse
from pegboard.errors import ConfigError, UsageError, did_you_mean
from pegboard.interfaces import KINDS


class FlagParser(argparse.ArgumentParser):
    """argparse with Pegboard's rules: abbreviations are not allowed, `_` and `-` are the same, and
    an error is a `UsageError` that names the most similar flag. A flag of type "number" takes 4096,
    4k or 4K. The class implements `pegboard.interfaces.command.FlagParser`, which commands get."""

    def __init__(self, **more: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **more
        )
        self.register("type", "number", number)
        self._sections: tuple[str, ...] = ()

    def format_help(self) -> str:
        """Return the help. Of the flags of settings it shows the most used ones; `--help=all` shows
        all."""
        common = {
            f"{section}.{setting.name}"
            for section in self._sections
            for setting in settings_of(section)
            if setting.is_common
        }
        rare = {
            action: action.help
            for action in self._actions
            if "." in action.dest and action.dest not in common
        }
        for action in rare:
            action.help = argparse.SUPPRESS
        text = super().format_help()
        for action, help in rare.items():
            action.help = help
        return text

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    # --- declaring --------------------------------------------------------------------------------

    def add_settings(
        self, *sections: str, only: Mapping[str, Collection[str]] | None = None
    ) -> None:
        """Add MODEL, --config, one flag for each setting of these sections, and vLLM's names. only:
        section → its settings that get flags; a section that is not in it gets all of them."""
        self._sections = sections
        self.epilog = (
            "These are the most used flags. --help=all shows all, --help=listgroup their groups, "
            "and --help=WORD those that match a word or belong to a group."
        )
        self.add_argument(
            "model", nargs="?", help="model reference: a path, org/name or scheme:name"
        )
        self.add_argument("--config", metavar="FILE", help="TOML or YAML file of settings")
        for section in sections:
            group = self.add_argument_group(f"{section} settings")
            for setting in settings_of(section):
                is_wanted = setting.name in (only or {}).get(section, (setting.name,))
                if is_wanted and (section, setting.name) != ("plugins", "options"):
                    _add_setting(group, setting)
        group = self.add_argument_group("vllm forms")
        for name, form in FORMS.items():
            if is_vllm_name(name):
                _add_flag(group, name, f"{VLLM}.{name}", form.help, form.type)
        for name, absent in ABSENT.items():
            if is_vllm_name(name):
                _add_flag(
                    self,
                    name,
                    f"{VLLM}.{name}",
                    argparse.SUPPRESS,
                    bool if absent.is_flag else object,
                )

    # --- parsing ----------------------------------------------------------------------------------

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words and return the namespace. Raises UsageError for an unknown flag, before
        it checks other things that may be wrong because of a mistyped flag.
        `--help=WORD` prints the flags of a group, or the flags that match, and exits like
        --help."""
        words = [_dashed(word) for word in words]
        for word in words:
            if word.startswith("--help="):
                self._explain(word.removeprefix("--help="))
                self.exit()
        self._refuse_unknown(
            word for word in words if word.startswith("--") and word != "--" and " " not in word
        )
        arguments, unknown = self.parse_known_args(words)
        self._refuse_unknown(word for word in unknown if word.startswith("-"))
        if unknown:
            raise UsageError(f"unexpected argument {unknown[0]!r} (see {self.prog} --help)")
        return arguments

    def parse_settings(
        self, words: Sequence[str], defaults: Mapping[str, Mapping[str, Any]] | None = None
    ) -> tuple[Settings, argparse.Namespace]:
        """Return the settings from files and flags, and the namespace. The parser must have the
        flags of settings. defaults: the command's own defaults by section and setting, which files
        and flags override. Raises ConfigError."""
        rest, dotted = split_dotted(_spelled_out(words))
        arguments = self.parse(rest)
        layer = _layer_of(arguments, dotted)
        if arguments.model is not None:
            flag = layer.setdefault("engine", {}).setdefault("model", arguments.model)
            if flag != arguments.model:
                raise UsageError(f"two models: {arguments.model!r} and --model {flag!r}")
        values = {section: dict((defaults or {}).get(section, {})) for section in self._sections}
        return settings_from(
            [(values, self.prog), *config_layers(arguments.config), (layer, "the command line")]
        ), arguments

    def _refuse_unknown(self, flags: Iterable[str]) -> None:
        known = set(self.flags)
        for word in flags:
            name = word.partition("=")[0]
            if name not in known:
                silent = [action for action in self._actions if action.help == argparse.SUPPRESS]
                acting = known.difference(*(action.option_strings for action in silent))
                raise UsageError(f"unknown flag {name}{did_you_mean(name, acting)}")

    @property
    def flags(self) -> Iterable[str]:
        """All flags, including those of sub-commands."""
        yield from self._option_string_actions
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser.flags

    def _explain(self, word: str) -> None:
        """Print the help that `word` asks for: "all", "listgroup", the name of a group, a flag, or
        a part of a flag. Raises UsageError."""
        groups = {
            str(group.title).partition(" ")[0]: group
            for group in self._action_groups
            if group._group_actions
        }
        word = word.strip("-").lower().replace("_", "-")
        if word == "all":
            print(super().format_help())
        elif word == "listgroup":
            print(
                "\n".join(
                    f"{name:<12} {len(group._group_actions)} flags"
                    for name, group in groups.items()
                )
            )
        elif word in groups:
            self._print_flags(groups[word]._group_actions)
        else:
            exact = [action for action in self._actions if f"--{word}" in action.option_strings]
            matches = exact or [
                action
                for action in self._actions
                if any(word in name for name in action.option_strings)
            ]
            if not matches:
                raise UsageError(f"no flag matches {word!r}{did_you_mean(f'--{word}', self.flags)}")
            self._print_flags(matches)

    def _print_flags(self, actions: Sequence[argparse.Action]) -> None:
        shown = self._get_formatter()
        acting = [action for action in actions if action.help != argparse.SUPPRESS]
        shown.add_arguments(acting)
        lines = [shown.format_help().rstrip()] if acting else []
        lines += ["no effect in Pegboard:"] if len(acting) < len(actions) else []
        for action in actions:
            if action.help == argparse.SUPPRESS:
                lines.append(
                    f"  {action.option_strings[0]}: {ABSENT[action.dest.partition('.')[2]].reason}"
                )
        print("\n".join(lines))


def _add_setting(group: Any, setting: Setting) -> None:
    prefix = "plugins_" if setting.section == "plugins" else ""
    name = prefix + setting.name
    more = [name for name, ours in ALIASES.items() if ours == setting.name] + (
        [setting.flag] if setting.flag else []
    )
    text = setting.help.replace("%", "%%")
    if setting.default not in (None, [], {}) and not isinstance(setting.default, bool):
        default = setting.default
        text += f" (default {' '.join(default) if isinstance(default, list) else default})"
    _add_flag(group, name, f"{setting.section}.{setting.name}", text, setting.type, more)


def _add_flag(
    group: Any, name: str, dest: str, text: str, annotation: Any, more: Sequence[str] = ()
) -> None:
    """Add one flag with its short form. If the user does not give the flag, it is not in the
    namespace."""
    names = [f"--{one.replace('_', '-')}" for one in (name, *more)] + (
        [SHORT[name]] if name in SHORT else []
    )
    group.add_argument(*names, dest=dest, default=argparse.SUPPRESS, help=text, **_form(annotation))


def _form(annotation: Any) -> dict[str, Any]:
    """Return the argparse arguments for a type. For `object` the value is parsed as JSON if
    possible and is text otherwise."""
    words: tuple[str, ...] = ()
    if get_origin(annotation) in (Union, types.UnionType):
        words = next(
            (get_args(part) for part in get_args(annotation)[1:] if get_origin(part) is Literal), ()
        )
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
    if origin is int and words:
        return {
            "type": lambda text: text if text in words else number(text),
            "metavar": "|".join(("N", *words)),
        }
    parse = {int: number, float: float, str: str, object: _json_or_text}[origin]
    return {"type": parse, "metavar": {int: "N", float: "X"}.get(origin, "TEXT")}


def number(text: str) -> int:
    """Parse an integer, which may have a unit: 4k (4000), 4K (4096), 25.6k."""
    try:
        return parse_number(text)
    except ValueError as error:
        message = (
            str(error)
            if "whole" in str(error)
            else f"{text!r} is not a number; expected one like 4096, 4k or 4K"
        )
        raise argparse.ArgumentTypeError(message) from None


def _json_mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a JSON object; expected one like '{{\"key\": 1}}'"
        )
    return value


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


# --- words ----------------------------------------------------------------------------------------


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _spelled_out(words: Sequence[str]) -> list[str]:
    """Replace vLLM's short forms that argparse does not know (-cc.mode 0, -O3) with the long
    ones."""
    long = {letters: f"--{name.replace('_', '-')}" for name, letters in SHORT.items()}
    spelled = []
    for word in words:
        letters, dot, rest = word.partition(".")
        if level := re.fullmatch(r"-O=?(\d)?", word):
            spelled += ["--optimization-level", *([level[1]] if level[1] else [])]
        else:
            spelled.append(long[letters] + dot + rest if dot and letters in long else word)
    return spelled


def split_dotted(words: Iterable[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Split off `--kind.name.field value` and `--kind.name.field=value`. Return the other words and
    [("kind.name.field", "value")]. Raises UsageError."""
    rest: list[str] = []
    dotted: list[tuple[str, str]] = []
    words = iter(words)
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


def _layer_of(arguments: argparse.Namespace, dotted: Iterable[tuple[str, str]]) -> Layer:
    """Return the settings of the command line by section. Raises UsageError."""
    layer: Layer = {}
    for dest, value in vars(arguments).items():
        section, dot, name = dest.partition(".")
        if dot:
            layer.setdefault(section, {})[name] = (
                _flat(dest, value) if isinstance(value, list) else value
            )
    mappings = {
        setting.name: "engine"
        for setting in settings_of("engine")
        if _form(setting.type).get("type") is _json_mapping
    }
    mappings |= {name: VLLM for name, form in FORMS.items() if form.type is not bool}
    mappings |= {name: VLLM for name, absent in ABSENT.items() if not absent.is_flag}
    for path, value in dotted:
        _place_dotted(layer, path, value, mappings)
    for name, value in layer.get(VLLM, {}).items():
        if name in ABSENT:
            try:
                refuse(name, value, f"--{name.replace('_', '-')}")
            except ConfigError as error:
                raise UsageError(str(error)) from None
    return layer


def _place_dotted(layer: Layer, path: str, value: str, mappings: Mapping[str, str]) -> None:
    """Put one dotted flag into the layer. mappings: setting whose value is a mapping → its section
    of the layer. Raises UsageError."""
    head, *middle, last = path.split(".")
    head = head.replace("-", "_")
    if head in mappings:
        target = layer.setdefault(mappings[head], {})
        for key in (head, *middle):
            target = target.setdefault(key.replace("-", "_"), {})
            if not isinstance(target, dict):
                raise UsageError(f"--{path}: {key} was also given the value {target!r}")
        target[last.replace("-", "_")] = _json_or_text(value)
    elif head in KINDS and middle:
        options = layer.setdefault("plugins", {}).setdefault("options", {})
        options.setdefault(f"{head}.{'.'.join(middle)}", {})[last.replace("-", "_")] = value
    else:
        raise UsageError(
            f"unknown flag --{path}: expected "
            f"--kind.name.field{did_you_mean(head, [*KINDS, *mappings])}"
        )


def _flat(dest: str, items: list[Any]) -> list[Any]:
    """Return the items with each JSON list among them replaced by the list's items."""
    flat: list[Any] = []
    for item in items:
        if not (isinstance(item, str) and item.startswith("[")):
            flat.append(item)
            continue
        try:
            flat += json.loads(item)
        except ValueError as error:
            raise UsageError(
                f"--{dest.partition('.')[2].replace('_', '-')}: {item!r} is not a JSON list: "
                f"{error}"
            ) from None
    return flat
