"""How a setting is declared: a field of a struct, `name: Annotated[type, doc("help")] = default`.
The command line, config files and the arguments of `LLM(...)` follow from the declaration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from pegboard.errors import ConfigError, did_you_mean

Section = TypeVar("Section", bound=msgspec.Struct)


def doc(
    help: str,
    *,
    is_common: bool = False,
    least: int | None = None,
    needs: str | None = None,
    flag: str | None = None,
) -> Meta:
    """Describe a setting. is_common: a command's short help shows it. least: the smallest value, if
    it is a number. needs: the setting without which this one has no effect, or several, "a or b";
    its default is always accepted. flag: another name of its flag."""
    more = {"is_common": is_common, "least": least, "needs": needs, "flag": flag}
    return Meta(description=help, extra=more)


@dataclass(frozen=True, slots=True)
class Setting:
    """One declared setting. is_common, least, needs, flag: see `doc`."""

    name: str
    section: str
    type: Any
    default: Any
    help: str
    is_common: bool
    least: int | None
    needs: str | None
    flag: str | None


@cache
def settings_in(cls: type[msgspec.Struct], section: str) -> tuple[Setting, ...]:
    """Return the settings of a section in declaration order."""
    settings = []
    hints = get_type_hints(cls, include_extras=True)
    for declared in msgspec.structs.fields(cls):
        plain, meta = get_args(hints[declared.name])
        default = (
            declared.default
            if declared.default is not msgspec.NODEFAULT
            else declared.default_factory()
        )
        settings.append(
            Setting(declared.name, section, plain, default, meta.description, **meta.extra)
        )
    return tuple(settings)


def build(cls: type[Section], values: Mapping[str, Any], source: str) -> Section:
    """Return `cls(**values)` after a check of all types. Raises ConfigError, which names the
    setting, its value and the most similar known name."""
    names = [info.name for info in msgspec.structs.fields(cls)]
    for name in values:
        if name not in names:
            raise ConfigError(f"unknown setting {name!r} from {source}{did_you_mean(name, names)}")
    try:
        return msgspec.convert(dict(values), cls)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error


def check(section: str, config: msgspec.Struct) -> None:
    """Raise ConfigError for a number that is too small, or a setting without the one it needs."""
    for setting in settings_in(type(config), section):
        value = getattr(config, setting.name)
        if setting.least is not None and isinstance(value, int | float) and value < setting.least:
            raise ConfigError(f"{setting.name} must be at least {setting.least}, got {value}")
        if (
            setting.needs is not None
            and value not in (None, setting.default)
            and not any(getattr(config, name) for name in setting.needs.split(" or "))
        ):
            raise ConfigError(f"{setting.name} needs {setting.needs}; without it, it has no effect")
