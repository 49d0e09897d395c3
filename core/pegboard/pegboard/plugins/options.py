"""Options of a plugin: one frozen pydantic model per implementation, addressed as
`kind.name.field`.

Values come from the config file and the command line. Fields that these leave out come from the
environment (`PEGBOARD__KIND__NAME__FIELD`). pydantic is imported only when a plugin with options is
built.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pegboard import env
from pegboard.errors import ConfigError, did_you_mean
from pegboard.installed import Entry
from pegboard.interfaces.spec import Spec
from pegboard.plugins.importing import import_part, import_spec
from pegboard.plugins.policy import OptionKey, names_entry, option_key

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

RawOptions = dict[OptionKey, dict[str, Any]]


def gather(entries: Iterable[Entry], options: Mapping[str, Mapping[str, Any]]) -> RawOptions:
    """Return the raw values per plugin. Values of the settings win over those of the environment.
    Raises ConfigError for an environment variable that addresses no plugin."""
    entries = list(entries)
    raw: RawOptions = {
        option_key(address): {name.replace("-", "_"): value for name, value in values.items()}
        for address, values in options.items()
    }
    for (kind, name, field), value in env.plugin_options().items():
        meant = {
            entry.name
            for entry in entries
            if entry.kind == kind and _env_name(entry.name) == _env_name(name)
        }
        if not meant:
            known = [f"{entry.kind}.{_env_name(entry.name)}" for entry in entries]
            variable = f"PEGBOARD__{kind}__{name}__{field}".upper()
            advice = did_you_mean(f"{kind}.{name}", known)
            raise ConfigError(
                f"environment variable {variable}: no plugin {kind}.{name} is installed{advice}"
            )
        for exact in sorted(meant):
            raw.setdefault((kind, exact), {}).setdefault(field, value)
    return raw


def raw_values(entry: Entry, raw: Mapping[OptionKey, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values given for this plugin. Values under its long name win over those under its
    short name."""
    values: dict[str, Any] = {}
    for kind, name in sorted(raw, key=lambda key: ":" in key[1]):
        if kind == entry.kind and names_entry(name, entry):
            values |= raw[kind, name]
    return values


def resolve(entry: Entry, spec: Spec, values: Mapping[str, Any]) -> BaseModel | None:
    """Return the options object of a plugin, or None if it has no options. pydantic parses text
    values (from the environment or the command line); lists and mappings among them are JSON.
    Raises ConfigError, which names `kind.name.field`."""
    if spec.options is None:
        if values:
            names = ", ".join(sorted(values))
            raise ConfigError(
                f"{entry.kind}.{entry.name} has no options, but was given {names} "
                f"({entry.distribution})"
            )
        return None
    model = import_part(entry, spec.options, "options")
    known = model.model_fields
    for field in values:
        if field not in known:
            advice = did_you_mean(field, known) or "; it has " + (", ".join(known) or "none")
            raise ConfigError(f"{entry.kind}.{entry.name}.{field}: no such option{advice}")
    from pydantic import ValidationError

    try:
        validated: BaseModel = model.model_validate(
            {field: _parsed(known[field], value) for field, value in values.items()}
        )
    except ValidationError as error:
        raise ConfigError(_explain(entry, error)) from error
    return validated


def schema_text(entry: Entry) -> str:
    """Return what `pegboard help kind.name` prints: each option with its type, default and meaning.
    Raises PluginBroken."""
    spec = import_spec(entry)
    address = f"{entry.kind}.{entry.name}"
    lines = [f"{address}   {entry.distribution} {entry.version}"]
    if spec.options is None:
        return "\n".join([*lines, "  no options"])
    model = import_part(entry, spec.options, "options")
    if model.__doc__:
        lines.append("  " + model.__doc__.strip().splitlines()[0])
    lines.append("")
    rows = [
        (name, _type_text(info), _default_text(info), info.description or "")
        for name, info in model.model_fields.items()
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    for row in rows:
        padded = "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=False))
        lines.append(f"  {padded}  {row[3]}".rstrip())
    if rows:
        first = rows[0][0]
        variable = f"PEGBOARD__{entry.kind}__{_env_name(entry.name)}__{first}".upper()
        flag = f"--{address}.{first.replace('_', '-')}"
        lines += [
            "",
            (
                f'set by: {flag} VALUE · plugins.options: "{address}": {{{first}: VALUE}} · '
                f"{variable}=VALUE"
            ),
        ]
    return "\n".join(lines)


def _env_name(name: str) -> str:
    """Return the name in the form that a variable can have: "rms_norm.avx2" → "rms_norm_avx2"."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower())


def _parsed(info: FieldInfo, value: Any) -> Any:
    """Decode text that looks like a JSON list or mapping, unless the field is text."""
    if isinstance(value, str) and value[:1] in ("[", "{") and info.annotation is not str:
        try:
            return json.loads(value)
        except ValueError:
            return value  # pydantic says what it expected
    return value


def _explain(entry: Entry, error: Any) -> str:
    problems = []
    for item in error.errors(include_url=False):
        field = ".".join(str(part) for part in item["loc"])
        address = ".".join(filter(None, (entry.kind, entry.name, field)))
        shown = "" if item["type"] == "missing" else f", got {item['input']!r}"
        problems.append(f"{address}: {item['msg']}{shown}")
    return "; ".join(problems)


def _type_text(info: FieldInfo) -> str:
    annotation: Any = info.annotation
    # list[int] is also a type
    plain = isinstance(annotation, type) and not hasattr(annotation, "__args__")
    return annotation.__name__ if plain else str(annotation).replace("typing.", "")


def _default_text(info: FieldInfo) -> str:
    return (
        "required"
        if info.is_required()
        else f"default {info.get_default(call_default_factory=True)!r}"
    )
