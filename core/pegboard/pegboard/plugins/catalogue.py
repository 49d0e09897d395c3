"""The installed plugins: finds them by name, applies the operator's rules, and reads specs and the
verdicts of probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from pegboard import env
from pegboard.config.schema import PluginConfig
from pegboard.errors import PluginBroken, PluginConflict, PluginUnsuitable
from pegboard.installed import Entry, normalized, without_label
from pegboard.interfaces.platform import PlatformSpec
from pegboard.interfaces.spec import Ok, Spec, Verdict
from pegboard.log import get_logger
from pegboard.plugins import policy
from pegboard.plugins.discovery import UNINSTALLED, Scan, outdated
from pegboard.plugins.importing import import_part, import_spec, run_probe
from pegboard.plugins.names import check_kind, not_found

logger = get_logger(__name__)


class Catalogue:
    """Keeps specs and verdicts, so asking twice costs nothing. unverified: distributions whose
    version is checked when they are first used."""

    def __init__(
        self, scan: Scan, config: PluginConfig, unverified: set[str] | None = None
    ) -> None:
        self.scan = scan
        self.config = config
        self._specs: dict[Entry, Spec] = {}
        self._verdicts: dict[Entry, Verdict] = {}
        self._replacements: dict[str, dict[str, Entry]] = {}
        self._quarantined: dict[Entry, str] = {}
        self._unverified = unverified or set()

    # --- look-up: metadata only -------------------------------------------------------------------

    def blocked(self, entry: Entry) -> str | None:
        """Return why the configuration forbids the entry, or None if it does not."""
        return policy.blocked(self.config, entry)

    def entries(self, kind: str) -> list[Entry]:
        """Return the allowed entries of a kind, sorted by name and distribution."""
        check_kind(kind)
        return [
            entry for entry in self.scan.entries if entry.kind == kind and not self.blocked(entry)
        ]

    def names(self, kind: str) -> list[str]:
        """Return the short names of the allowed entries, without duplicates."""
        return sorted({entry.name for entry in self.entries(kind)})

    def find(self, kind: str, name: str) -> Entry:
        """Return the entry called `name`, or "distribution:name". The entry of a name with a label
        has the label in its name.

        Raises PluginNotFound, which says what to install or what was meant, PluginConflict if
        several distributions provide it, and PluginUnsuitable if it is installed but blocked by a
        rule or made for another interface.
        """
        check_kind(kind)
        if (plain := without_label(kind, name)) != name:
            entry = self.find(kind, plain)
            return replace(entry, name=entry.name + name.removeprefix(plain))
        distribution, colon, short = name.rpartition(":")
        named = [entry for entry in self.scan.entries if entry.kind == kind and entry.name == short]
        if colon:
            named = [entry for entry in named if entry.distribution == normalized(distribution)]
        allowed = [entry for entry in named if not self.blocked(entry)]
        if not colon:
            replaced = self.replacements(kind)
            allowed = list(dict.fromkeys(replaced.get(entry.qualified, entry) for entry in allowed))
        if len(allowed) > 1:
            raise self.conflict(kind, name, allowed)
        if allowed:
            return allowed[0]
        if named:
            reasons = "; ".join(f"{entry.id} is {self.blocked(entry)}" for entry in named)
            raise PluginUnsuitable(
                f"{kind} {name!r} may not be used: {reasons}", plugin=named[0].id
            )
        for unusable in self.scan.unusable:
            if unusable.entry.kind == kind and name in (
                unusable.entry.name,
                unusable.entry.qualified,
            ):
                raise PluginUnsuitable(
                    f"{unusable.entry.id} cannot be used: {unusable.reason}",
                    plugin=unusable.entry.id,
                )
        if colon:
            raise not_found(kind, name, [entry.qualified for entry in self.entries(kind)])
        raise not_found(kind, name, self.names(kind))

    def conflict(self, kind: str, name: str, entries: Sequence[Entry]) -> PluginConflict:
        """Return the error for a short name that several distributions provide."""
        forms = " or ".join(
            repr(entry.qualified) for entry in sorted(entries, key=lambda entry: entry.sort_key)
        )
        return PluginConflict(
            f"{kind} {name!r} is provided by several distributions: write {forms}, or deny all "
            "but one of them"
        )

    def replacements(self, kind: str) -> Mapping[str, Entry]:
        """Return {qualified name: the entry that replaces it}. Both the plugin (`replaces`) and the
        operator (`override`) must want this. Only the specs of overriding plugins are read."""
        if kind not in self._replacements:
            replacements: dict[str, Entry] = {}
            for entry in self.entries(kind) if self.config.override else ():
                if not policy.overrides(self.config, entry):
                    continue
                for qualified in self.spec(entry).replaces:
                    distribution, _, name = qualified.rpartition(":")
                    target = f"{normalized(distribution)}:{name}"
                    if target in replacements:
                        raise self.conflict(kind, qualified, [replacements[target], entry])
                    replacements[target] = entry
            self._replacements[kind] = replacements
        return self._replacements[kind]

    def enabled(self, kind: str) -> list[Entry]:
        """Return the entries of an ambient kind that run: those that are installed, allowed, and
        either a default or enabled. Raises PluginConflict if two distributions provide the same
        enabled name."""
        running = [entry for entry in self.entries(kind) if policy.enabled(self.config, entry)]
        replaced = self.replacements(kind)
        running = list(dict.fromkeys(replaced.get(entry.qualified, entry) for entry in running))
        for entry in running:
            same = [other for other in running if other.name == entry.name]
            if len(same) > 1:
                raise self.conflict(kind, entry.name, same)
        return running

    def enabled_hooks(self) -> list[Entry]:
        """Return the entries of the hooks group that run, sorted."""
        return [
            entry
            for entry in self.scan.hooks
            if not self.blocked(entry) and policy.enabled(self.config, entry)
        ]

    # --- tier 1: specs and verdicts ---------------------------------------------------------------

    def spec(self, entry: Entry) -> Spec:
        """Return the entry's spec, which is imported on first use. Raises PluginBroken."""
        if entry not in self._specs:
            self.verify_version(entry)
            self._specs[entry] = import_spec(entry)
        return self._specs[entry]

    def verdict(self, entry: Entry) -> Verdict:
        """Return the verdict of the entry's probe on this machine, or Ok if it has no probe. The
        probe runs only once. Raises PluginBroken if it cannot be imported."""
        if entry not in self._verdicts:
            probe = self.spec(entry).probe
            self._verdicts[entry] = run_probe(import_part(entry, probe, "probe")) if probe else Ok()
        return self._verdicts[entry]

    def runs_on(self, spec: Spec, platform: str) -> bool:
        """Return whether a plugin runs on a platform: it names that family, or one whose plugins
        the platform also runs."""
        if spec.platforms is None or platform in spec.platforms:
            return True
        named = [entry for entry in self.entries("platform") if entry.name == platform]
        return any(spec.platforms & cast(PlatformSpec, self.spec(entry)).runs for entry in named)

    def verify_version(self, entry: Entry) -> None:
        """Check that, in a child process, the distribution has the version that the parent saw.
        Raises PluginBroken, which names both versions."""
        if entry.distribution not in self._unverified or entry.version == UNINSTALLED:
            return
        from importlib.metadata import PackageNotFoundError, version

        try:
            here = version(entry.distribution)
        except PackageNotFoundError:
            # without metadata (a zip, a vendored copy), the import shows whether it works
            here = entry.version
        if here != entry.version:
            message = (
                f"{entry.id}: version {entry.version} is locked, but {here} is installed on this "
                "host"
            )
            raise PluginBroken(f"{message}; install the same on every host", plugin=entry.id)
        self._unverified.discard(entry.distribution)

    def quarantine(self, entry: Entry, reason: str) -> None:
        """Leave out a plugin that does not work and was not asked for by name, and warn once. With
        PEGBOARD_STRICT this is an error."""
        if env.strict():
            raise PluginBroken(f"{entry.id}: {reason} (PEGBOARD_STRICT=1)", plugin=entry.id)
        if entry not in self._quarantined:
            self._quarantined[entry] = reason
            logger.warning(
                "plugin %s is left out: %s; see `pegboard plugins doctor`", entry.id, reason
            )

    def describe(self) -> list[dict[str, Any]]:
        """Return every entry as plain data, with the reason why it may not be used ("" = it may).
        `plugins list` and the API show this."""
        rows = [
            (entry, self.blocked(entry) or "") for entry in (*self.scan.entries, *self.scan.hooks)
        ]
        rows += [(unusable.entry, unusable.reason) for unusable in self.scan.unusable]
        return [
            {
                "kind": entry.kind,
                "name": entry.name,
                "distribution": entry.distribution,
                "version": entry.version,
                "value": entry.value,
                "reason": reason,
                "enabled": not reason and policy.enabled(self.config, entry),
                "outdated": "" if reason else outdated(entry),
            }
            for entry, reason in sorted(rows, key=lambda row: row[0].sort_key)
        ]
