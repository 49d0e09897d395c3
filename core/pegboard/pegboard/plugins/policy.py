"""The rules about which plugins may be used. They are not a sandbox: a package that is installed is already trusted.

A pattern is a distribution ("acme-llama"), "kind:name" ("attention:triton") or "kind:distribution:name" (for a name that
two distributions share). A pattern that matches nothing known is an error, so that a misspelled rule is not silently ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pegboard import env
from pegboard.errors import ConfigError, did_you_mean
from pegboard.interfaces import KINDS
from pegboard.plugins.defaults import catalogue, default_enabled
from pegboard.plugins.discovery import HOOKS_KIND, Entry, Scan, normalized

if TYPE_CHECKING:
    from pegboard.config.schema import PluginConfig

OptionKey = tuple[str, str]
"""(kind, name), where name is the short one or "distribution:name"."""


@dataclass(frozen=True, slots=True)
class PluginPolicy:
    """allow: None = everything installed. Otherwise only what matches; a kind that no pattern names is left alone as long
        as all patterns are of the form kind:name (restricting one kind does not switch off another).
    deny: never these. override: distributions whose `replaces` is granted.
    enable, disable: ambient plugins (hooks, api, metrics, builtin_tool) to run in addition to the defaults, or not to run.
    options: {(kind, name): {field: value}} from file and command line.
    """

    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    override: tuple[str, ...] = ()
    enable: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    options: Mapping[OptionKey, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: PluginConfig | None = None) -> PluginPolicy:
        """The policy of a configuration. PEGBOARD_PLUGINS is the allow list where the configuration has none.
        Raises ConfigError for an option address that is not "kind.name"."""
        if config is None:
            from pegboard.config.schema import PluginConfig

            config = PluginConfig()
        return cls(
            allow=tuple(config.allow) if config.allow is not None else env.plugins_allowed(),
            deny=tuple(config.deny),
            override=tuple(config.override),
            enable=tuple(config.enable),
            disable=tuple(config.disable),
            options={option_key(address): dict(values) for address, values in config.options.items()},
        )

    def blocked(self, entry: Entry) -> str | None:
        """The reason why the policy forbids the entry; None = allowed."""
        for pattern in self.deny:
            if matches(pattern, entry):
                return f"denied by {pattern!r} in plugins.deny"
        if self.allow is None or any(matches(pattern, entry) for pattern in self.allow):
            return None
        kinds = {pattern.partition(":")[0] for pattern in self.allow if ":" in pattern}
        only_names = bool(self.allow) and all(":" in pattern for pattern in self.allow)
        if only_names and entry.kind not in kinds:
            return None
        return "not in plugins.allow"

    def overrides(self, entry: Entry) -> bool:
        """True when the operator lets this entry replace what its spec's `replaces` names."""
        return any(matches(pattern, entry) for pattern in self.override)

    def enabled(self, entry: Entry) -> bool:
        """True when the entry may act: passive kinds always, ambient ones when a default or enabled, and not disabled."""
        if not is_ambient(entry):
            return True
        if any(matches(pattern, entry) for pattern in self.disable):
            return False
        return entry.name in default_enabled(entry.kind) or any(matches(pattern, entry) for pattern in self.enable)

    def check(self, scan: Scan) -> None:
        """Raises ConfigError for a pattern or option address that matches nothing installed or catalogued, and for
        enabling something that is not installed or not ambient."""
        installed = list(scan.all_entries())
        for setting in ("allow", "deny", "override", "enable", "disable"):
            for pattern in getattr(self, setting) or ():
                _check_pattern(setting, pattern, installed)
        for pattern in self.enable:
            _check_enable(pattern, installed)
        for kind, name in self.options:
            if not any(entry.kind == kind and name in (entry.name, entry.qualified) for entry in installed):
                known = [f"{entry.kind}.{entry.name}" for entry in installed]
                advice = _advice(f"{kind}.{name}", f"{kind}:{name}", known)
                raise ConfigError(f"options for {kind}.{name}: no such plugin is installed{advice}")


def is_ambient(entry: Entry) -> bool:
    """True for kinds that act by being present: hooks, and what `KINDS` marks so."""
    return entry.kind == HOOKS_KIND or (entry.kind in KINDS and KINDS[entry.kind].ambient)


def option_key(address: str) -> OptionKey:
    """("attention", "triton") from "attention.triton"; the name may hold dots."""
    kind, dot, name = address.partition(".")
    if not (kind and dot and name):
        raise ConfigError(f"plugin options {address!r}: expected the form kind.name, as in 'attention.triton'")
    return kind, name


def matches(pattern: str, entry: Entry) -> bool:
    """True when the pattern means this entry."""
    parts = pattern.split(":")
    if len(parts) == 1:
        return normalized(pattern) == entry.distribution
    if len(parts) == 2:
        return parts == [entry.kind, entry.name]
    return parts[0] == entry.kind and normalized(parts[1]) == entry.distribution and ":".join(parts[2:]) == entry.name


def _check_pattern(setting: str, pattern: str, installed: Iterable[Entry]) -> None:
    if any(matches(pattern, entry) for entry in installed) or (setting in ("allow", "deny", "disable") and _catalogued(pattern)):
        return  # a rule about something known but not installed here is harmless: one file may serve many machines
    if ":" in pattern:
        known = [f"{entry.kind}:{entry.name}" for entry in installed]
    else:
        known = [entry.distribution for entry in installed]
    raise ConfigError(f"plugins.{setting}: {pattern!r} matches nothing installed{_advice(pattern, pattern, known)}")


def _advice(written: str, pattern: str, known: Iterable[str]) -> str:
    kind, _, name = pattern.partition(":")
    distribution = catalogue().get(kind, {}).get(name) if name else (normalized(pattern) if _catalogued(pattern) else None)
    return f": pip install {distribution}" if distribution else did_you_mean(written, known)


def _catalogued(pattern: str) -> bool:
    kind, _, name = pattern.partition(":")
    if name:
        return name.rpartition(":")[2] in catalogue().get(kind, {})
    return any(normalized(pattern) in names.values() for names in catalogue().values())


def _check_enable(pattern: str, installed: Iterable[Entry]) -> None:
    if not any(is_ambient(entry) for entry in installed if matches(pattern, entry)):
        kinds = ", ".join([HOOKS_KIND, *(name for name, kind in KINDS.items() if kind.ambient)])
        raise ConfigError(f"plugins.enable: {pattern!r} is not of an ambient kind ({kinds}); others run when chosen")
