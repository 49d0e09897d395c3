"""The rules about which plugins may be used. They are not a sandbox: a package that is installed is
already trusted.

A pattern is a distribution ("acme-llama"), "kind:name" ("attention:triton") or
"kind:distribution:name" (for a name that two distributions share). A pattern that matches nothing
known is an error, because a misspelled rule must not be ignored silently.
"""

from __future__ import annotations

from collections.abc import Iterable

from pegboard.config.schema import PluginConfig
from pegboard.errors import ConfigError, did_you_mean
from pegboard.installed import Entry, normalized, without_label
from pegboard.interfaces import KINDS
from pegboard.plugins.defaults import catalogue, default_enabled
from pegboard.plugins.discovery import HOOKS_KIND, UNINSTALLED, Scan

OptionKey = tuple[str, str]
"""(kind, name), where name is the short one or "distribution:name"."""


def blocked(config: PluginConfig, entry: Entry) -> str | None:
    """Return why the rules forbid the entry, or None if they allow it. If all patterns of an allow
    list have the form kind:name, the list restricts only the kinds that it names."""
    for pattern in config.deny:
        if matches(pattern, entry):
            return f"denied by {pattern!r} in plugins.deny"
    if config.allow is None or any(matches(pattern, entry) for pattern in config.allow):
        return None
    kinds = {pattern.partition(":")[0] for pattern in config.allow if ":" in pattern}
    only_names = bool(config.allow) and all(":" in pattern for pattern in config.allow)
    if only_names and entry.kind not in kinds:
        return None
    return "not in plugins.allow"


def overrides(config: PluginConfig, entry: Entry) -> bool:
    """Return whether the operator lets this entry replace the plugins that its spec's `replaces`
    names."""
    return any(matches(pattern, entry) for pattern in config.override)


def enabled(config: PluginConfig, entry: Entry) -> bool:
    """Return whether the entry may act. Entries of passive kinds always may. Ambient ones may if
    they are a default or enabled, and not disabled. Those of a file that was named count as
    enabled."""
    if not is_ambient(entry):
        return True
    if any(matches(pattern, entry) for pattern in config.disable):
        return False
    if entry.version == UNINSTALLED or entry.name in default_enabled(entry.kind):
        return True
    return any(matches(pattern, entry) for pattern in config.enable)


def check(config: PluginConfig, scan: Scan) -> None:
    """Raise ConfigError if a pattern or option address matches nothing that is installed or
    catalogued, or if `enable` names something that is not installed or not ambient."""
    if config.reload and config.lock is not None:
        raise ConfigError("plugins.reload reads changed code, and plugins.lock forbids it")
    installed = list(scan.all_entries())
    for setting in ("allow", "deny", "override", "enable", "disable"):
        for pattern in getattr(config, setting) or ():
            _check_pattern(setting, pattern, installed)
    for pattern in config.enable:
        _check_enable(pattern, installed)
    for entry in installed:
        if entry.version == UNINSTALLED and (reason := blocked(config, entry)):
            raise ConfigError(f"--plugin: {entry.id} may not be used: {reason}")
    for kind, name in map(option_key, config.options):
        plain = without_label(kind, name)
        if not any(entry.kind == kind and names_entry(plain, entry) for entry in installed):
            known = [f"{entry.kind}.{entry.name}" for entry in installed]
            advice = _advice(f"{kind}.{name}", f"{kind}:{name}", known)
            if not advice and (
                names := sorted({entry.name for entry in installed if entry.kind == kind})
            ):
                advice = f"; installed: {', '.join(names)}"
            raise ConfigError(f"options for {kind}.{name}: no such plugin is installed{advice}")


def is_ambient(entry: Entry) -> bool:
    """True for kinds that act by being present: hooks, and the kinds that `KINDS` marks as
    ambient."""
    return entry.kind == HOOKS_KIND or (entry.kind in KINDS and KINDS[entry.kind].ambient)


def option_key(address: str) -> OptionKey:
    """Split "attention.triton" into ("attention", "triton"). The name may contain dots."""
    kind, dot, name = address.partition(".")
    if not (kind and dot and name):
        raise ConfigError(
            f"plugin options {address!r}: expected the form kind.name, as in 'attention.triton'"
        )
    return kind, name


def names_entry(name: str, entry: Entry) -> bool:
    """True if an option address with this name means this entry. `-` and `_` are the same, as in
    flags."""
    return name.replace("_", "-") in (
        entry.name.replace("_", "-"),
        entry.qualified.replace("_", "-"),
    )


def matches(pattern: str, entry: Entry) -> bool:
    """True if the pattern matches this entry."""
    parts = pattern.split(":")
    if len(parts) == 1:
        return normalized(pattern) == entry.distribution
    name = without_label(entry.kind, entry.name)
    if len(parts) == 2:
        return parts == [entry.kind, name]
    return (
        parts[0] == entry.kind
        and normalized(parts[1]) == entry.distribution
        and ":".join(parts[2:]) == name
    )


def _check_pattern(setting: str, pattern: str, installed: Iterable[Entry]) -> None:
    if any(matches(pattern, entry) for entry in installed) or (
        setting in ("allow", "deny", "disable") and _catalogued(pattern)
    ):
        # a rule about a known plugin that is not installed here is harmless: several machines may
        # use the same file
        return
    if ":" in pattern:
        known = [f"{entry.kind}:{entry.name}" for entry in installed]
    else:
        known = [entry.distribution for entry in installed]
    raise ConfigError(
        f"plugins.{setting}: {pattern!r} matches nothing "
        f"installed{_advice(pattern, pattern, known)}"
    )


def _advice(written: str, pattern: str, known: Iterable[str]) -> str:
    kind, _, name = pattern.partition(":")
    distribution = (
        catalogue().get(kind, {}).get(name)
        if name
        else (normalized(pattern) if _catalogued(pattern) else None)
    )
    return f": pip install {distribution}" if distribution else did_you_mean(written, known)


def _catalogued(pattern: str) -> bool:
    kind, _, name = pattern.partition(":")
    if name:
        return name.rpartition(":")[2] in catalogue().get(kind, {})
    return any(normalized(pattern) in names.values() for names in catalogue().values())


def _check_enable(pattern: str, installed: Iterable[Entry]) -> None:
    if not any(is_ambient(entry) for entry in installed if matches(pattern, entry)):
        kinds = ", ".join([HOOKS_KIND, *(name for name, kind in KINDS.items() if kind.ambient)])
        raise ConfigError(
            f"plugins.enable: {pattern!r} is not of an ambient kind ({kinds}); others run when "
            "chosen"
        )
