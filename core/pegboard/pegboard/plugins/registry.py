"""The installed plugins of one process: finds them by name, chooses them by need, and builds the
chosen ones.

registry = Registry.discover(config)            # in the parent: one scan
decision = registry.choose("attention", need)   # explained and remembered
backend = registry.build(decision.require(), setup)
child = Registry.from_lock(lock)                # in a child: no scan, the same choices
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pegboard import env
from pegboard.config.schema import PluginConfig
from pegboard.errors import ConfigError, PluginBroken, PluginConflict, PluginUnsuitable, blame
from pegboard.interfaces.platform import PlatformSpec
from pegboard.interfaces.spec import Need, Ok, Spec, Verdict
from pegboard.log import get_logger
from pegboard.plugins import choosing, discovery, options, policy
from pegboard.plugins.class_specs import misfit
from pegboard.plugins.discovery import UNINSTALLED, Entry, Scan, normalized
from pegboard.plugins.importing import (
    import_object,
    import_part,
    import_spec,
    incompatibility,
    module_name,
    run_probe,
)
from pegboard.plugins.names import check_kind, not_found
from pegboard.plugins.options import RawOptions
from pegboard.plugins.selection import Decision

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class PluginLock:
    """The resolved set of plugins as one value. The parent resolves it once. Children get it and
    never scan. Picklable.

    options: raw values per plugin, including those of the environment, so that a child reads no
    environment variable. They may be secrets, so they may be sent but never logged.
    """

    scan: Scan = Scan()
    config: PluginConfig = PluginConfig()
    options: RawOptions = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()


class Registry:
    """Keeps specs, verdicts and choices, so asking twice costs nothing. Tests may build `scan`
    themselves, with entries whose `value` names fakes."""

    def __init__(
        self,
        scan: Scan,
        config: PluginConfig | None = None,
        *,
        raw_options: RawOptions | None = None,
    ) -> None:
        self.scan = scan
        self.config = config or PluginConfig()
        self.decisions: dict[tuple[str, str], Decision] = {}
        self.locked: dict[tuple[str, str], Decision] = {}
        self._raw_options = (
            options.gather(scan.entries, self.config.options)
            if raw_options is None
            else raw_options
        )
        self._specs: dict[Entry, Spec] = {}
        self._verdicts: dict[Entry, Verdict] = {}
        self._replacements: dict[str, dict[str, Entry]] = {}
        self._quarantined: dict[Entry, str] = {}
        self._unverified: set[str] = set()
        self._fitting: set[tuple[Entry, str]] = set()

    @classmethod
    def discover(
        cls, config: PluginConfig | None = None, processors: Sequence[str] = ()
    ) -> Registry:
        """Return a registry of everything that is installed, and of `config.files`, under the rules
        of `config`. Scans once per process. processors: names of logits processors, which may be
        classes, "module:Class". Raises ConfigError for a rule about something unknown or a wrong
        file, and PluginBroken if a file fails."""
        scan = discovery.scan()
        if (config is not None and config.files) or any(":" in name for name in processors):
            from pegboard.plugins.uninstalled import with_classes, with_files

            scan = with_files(scan, config.files if config is not None else ())
            scan = with_classes(scan, "logits_processor", processors)
        registry = cls(scan, config)
        policy.check(registry.config, scan)
        return registry

    @classmethod
    def from_lock(cls, lock: PluginLock) -> Registry:
        """Return the registry that the parent resolved. Neither packages nor the environment are
        read. The first use of a distribution raises PluginBroken if its version differs from the
        locked one."""
        registry = cls(lock.scan, lock.config, raw_options=lock.options)
        registry.locked = {(made.kind, made.key): made for made in lock.decisions}
        registry._unverified = {entry.distribution for entry in lock.scan.all_entries()}
        return registry

    def lock(self) -> PluginLock:
        """Return this registry as a value for child processes."""
        return PluginLock(self.scan, self.config, self._raw_options, tuple(self.decisions.values()))

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
        """Return the entry called `name`, or "distribution:name".

        Raises PluginNotFound, which says what to install or what was meant, PluginConflict if
        several distributions provide it, and PluginUnsuitable if it is installed but blocked by a
        rule or made for another interface.
        """
        check_kind(kind)
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
            found: dict[str, Entry] = {}
            for entry in self.entries(kind) if self.config.override else ():
                if not policy.overrides(self.config, entry):
                    continue
                for qualified in self.spec(entry).replaces:
                    distribution, _, name = qualified.rpartition(":")
                    target = f"{normalized(distribution)}:{name}"
                    if target in found:
                        raise self.conflict(kind, qualified, [found[target], entry])
                    found[target] = entry
            self._replacements[kind] = found
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

    # --- choice -----------------------------------------------------------------------------------

    def choose(
        self,
        kind: str,
        need: Need,
        *,
        explicit: str | None = None,
        keys: Sequence[str] | None = None,
        prefers: Sequence[str] = (),
        key: str = "",
        among: Iterable[Entry] | None = None,
        required: bool = True,
    ) -> Decision:
        """Choose the best plugin of `kind` for `need`, and record the decision under (kind, key).

        explicit: the user's choice (None or "auto" = none). It is used, or an error is raised; no
        other plugin replaces it. keys: for a keyed kind, the names to look for, in this order,
        followed by "*". If one of these plugins is broken, an error is raised instead of taking the
        next. key: the first of `keys` if not given. prefers: names that the model or the platform
        prefers; unknown names are ignored. among: only these entries are considered. required: if
        False and nothing is suitable, a Decision without a winner is returned instead of an error.

        Raises PluginNotFound, PluginUnsuitable (with the table), PluginBroken or PluginConflict.
        """
        key = key or (keys[0] if keys else "")
        if explicit not in (None, "auto"):
            made = self.record(choosing.choose_explicit(self, kind, need, str(explicit), key))
        else:
            made = choosing.choose_ranked(
                self,
                kind,
                need,
                key=key,
                keys=keys,
                prefers=prefers,
                among=among,
                required=required,
            )
        logger.debug("%s", made.line())
        return made

    def record(self, decision: Decision) -> Decision:
        """Keep a decision for explanations and for the lock. Returns the decision."""
        self.decisions[decision.kind, decision.key] = decision
        return decision

    # --- tier 2: implementations ------------------------------------------------------------------

    def load(self, entry: Entry) -> Callable[..., Any]:
        """Import the entry's implementation. Raises PluginBroken, or PluginUnsuitable for a blocked
        or incompatible entry."""
        if reason := self.blocked(entry):
            raise PluginUnsuitable(f"{entry.id} may not be used: {reason}", plugin=entry.id)
        spec = self.spec(entry)
        if reason := incompatibility(entry, spec):
            raise PluginUnsuitable(f"{entry.id} cannot be used: {reason}", plugin=entry.id)
        implementation: Callable[..., Any] = import_part(
            entry, spec.implementation, "implementation"
        )
        if not callable(implementation):
            message = (
                f"{entry.id}: {spec.implementation!r} is a {type(implementation).__name__}, "
                "expected a class or function"
            )
            raise PluginBroken(message, plugin=entry.id)
        return implementation

    def options(self, entry: Entry) -> Any:
        """Return the entry's validated options object, or None if it has no options. Raises
        ConfigError."""
        return options.resolve(
            entry, self.spec(entry), options.raw_values(entry, self._raw_options)
        )

    def has_options(self, entry: Entry) -> bool:
        """Return whether any option of this plugin was given."""
        return bool(options.raw_values(entry, self._raw_options))

    def check_options(self) -> None:
        """Validate every option that was given, including those of plugins that are not chosen.
        Raises ConfigError."""
        for entry in self.scan.entries:
            if not self.blocked(entry) and self.has_options(entry):
                self.options(entry)

    def build(self, entry: Entry, setup: object) -> Any:
        """Return `Implementation(options, setup)`. Raises as `load` and `options` do. An error of
        the constructor becomes a PluginFailure that names the plugin, unless it is one of
        Pegboard's errors."""
        implementation = self.load(entry)
        chosen_options = self.options(entry)
        with blame(entry.id):
            return self.checked(entry, implementation(chosen_options, setup), setup)

    def checked(self, entry: Entry, built: Any, setup: object, part: str = "implementation") -> Any:
        """Return a plugin's object, with PEGBOARD_CHECK wrapped by checks of all that it returns.
        part: which part of the spec has made it. Raises PluginBroken if the first one of a part
        does not fit its interface."""
        if (entry, part) not in self._fitting:
            if wrong := misfit(entry.kind, part, built):
                raise PluginBroken(
                    f"{entry.id}: {getattr(self.spec(entry), part)!r} {wrong}", plugin=entry.id
                )
            self._fitting.add((entry, part))
        if not env.check():
            return built
        try:
            check = import_object("pegboard_testing.check_mode:checked")
        except ModuleNotFoundError as error:
            raise ConfigError(f"PEGBOARD_CHECK=1: {error}: pip install pegboard-testing") from error
        return check(entry, built, setup)

    def modules(self) -> dict[str, str]:
        """Return the modules of plugins, and their top-level packages → the plugin's id, for
        `errors.culprit`. A module that several plugins share belongs to the one that was chosen, or
        else to their distribution. Commands are left out, because everything else runs in their
        frames."""
        chosen = {made.winner for made in self.decisions.values()}
        roots: dict[str, list[Entry]] = {}
        parts: dict[str, list[Entry]] = {}
        for entry in (*self.scan.entries, *self.scan.hooks):
            if entry.kind == "command":
                continue
            roots.setdefault(module_name(entry.value).partition(".")[0], []).append(entry)
            spec = self._specs.get(entry)
            paths = [
                getattr(spec, part, None) or ""
                for part in ("implementation", "validate", "worker", "adapters")
            ]
            for module in {module_name(path) for path in paths} - {""}:
                parts.setdefault(module, []).append(entry)
        owners = {}
        for module, entries in (roots | parts).items():
            ours = [entry for entry in entries if entry in chosen] or entries
            owners[module] = (
                ours[0].id if len(ours) == 1 else f"{ours[0].distribution} {ours[0].version}"
            )
        return owners

    def describe_decisions(self) -> list[dict[str, Any]]:
        """Return every choice of this process as plain data: the need, the winner and why it won,
        and what stopped the others."""
        return [made.describe() for _, made in sorted(self.decisions.items())]

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
            }
            for entry, reason in sorted(rows, key=lambda row: row[0].sort_key)
        ]
