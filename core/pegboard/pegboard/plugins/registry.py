"""The installed plugins of one process: finds them by name, chooses them by need, and builds the
chosen ones.

registry = Registry.discover(config)            # in the parent: one scan
decision = registry.choose("attention", need)   # explained and remembered
backend = registry.build(decision.require(), setup)
child = Registry.from_lock(lock)                # in a child: no scan, the same choices
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pegboard import env
from pegboard.config.schema import PluginConfig
from pegboard.errors import ConfigError, PluginBroken, PluginUnsuitable, blame
from pegboard.installed import Entry
from pegboard.interfaces import KINDS
from pegboard.interfaces.spec import Ok
from pegboard.log import get_logger
from pegboard.plugins import discovery, options, policy
from pegboard.plugins.catalogue import Catalogue
from pegboard.plugins.choosing import Chooser
from pegboard.plugins.class_specs import misfit
from pegboard.plugins.discovery import Scan
from pegboard.plugins.importing import (
    import_object,
    import_part,
    incompatibility,
    module_name,
)
from pegboard.plugins.options import RawOptions
from pegboard.plugins.reloading import RELOADED, ReloadedProcessor, Reloader
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


FEW = 3
"""The number of plugins of a package that a message names at most."""


class Registry(Catalogue):
    """The catalogue of one process, with its choices and the objects that it builds. Tests may
    build `scan` themselves, with entries whose `value` names fakes."""

    def __init__(
        self,
        scan: Scan,
        config: PluginConfig | None = None,
        *,
        raw_options: RawOptions | None = None,
        decisions: Sequence[Decision] = (),
        unverified: set[str] | None = None,
    ) -> None:
        super().__init__(scan, config or PluginConfig(), unverified)
        self._chooser = Chooser(self, decisions)
        self.choose = self._chooser.choose
        self.record = self._chooser.record
        self.decisions = self._chooser.decisions
        self._raw_options = (
            options.gather(scan.entries, self.config.options)
            if raw_options is None
            else raw_options
        )
        self._fitting: set[tuple[Entry, str]] = set()
        self._aged: set[Entry] = set()
        self._assumed: dict[Entry, Callable[..., Any]] = {}
        self._reloader = Reloader() if self.config.reload else None

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
        return cls(
            lock.scan,
            lock.config,
            raw_options=lock.options,
            decisions=lock.decisions,
            unverified={entry.distribution for entry in lock.scan.all_entries()},
        )

    def lock(self) -> PluginLock:
        """Return this registry as a value for child processes."""
        return PluginLock(self.scan, self.config, self._raw_options, tuple(self.decisions.values()))

    # --- tier 2: implementations ------------------------------------------------------------------

    def assume(self, entry: Entry, implementation: Callable[..., Any]) -> None:
        """From now on, this plugin's probe has succeeded, and `implementation` is built in its
        place. It is for explanations of what would be chosen on another machine."""
        self._verdicts[entry] = Ok()
        self._assumed[entry] = implementation

    def load(self, entry: Entry) -> Callable[..., Any]:
        """Import the entry's implementation. Raises PluginBroken, or PluginUnsuitable for a blocked
        or incompatible entry."""
        if reason := self.blocked(entry):
            raise PluginUnsuitable(f"{entry.id} may not be used: {reason}", plugin=entry.id)
        if entry in self._assumed:
            return self._assumed[entry]
        spec = self.spec(entry)
        if reason := incompatibility(entry, spec):
            raise PluginUnsuitable(f"{entry.id} cannot be used: {reason}", plugin=entry.id)
        reloader = self._reloader if entry.kind in RELOADED else None
        if reloader is not None and reloader.refresh(entry, spec.implementation):
            self._fitting.discard((entry, "implementation"))
        implementation: Callable[..., Any] = import_part(
            entry, spec.implementation, "implementation"
        )
        if reloader is not None:
            reloader.note(entry, spec.implementation)
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
        Pegboard's errors. With `plugins.reload`, a logits processor follows its code."""
        if self._reloader is not None and entry.kind == "logits_processor":
            refresh = partial(self._reloader.refresh, entry, self.spec(entry).implementation)
            return ReloadedProcessor(entry.id, refresh, partial(self._built, entry, setup))
        return self._built(entry, setup)

    def function(self, entry: Entry, path: str, what: str) -> Callable[..., Any]:
        """Return a function of a plugin, which follows its code with `plugins.reload`. Raises
        PluginBroken."""
        if self._reloader is not None:
            return self._reloader.function(entry, path, what)
        function: Callable[..., Any] = import_part(entry, path, what)
        return function

    def _built(self, entry: Entry, setup: object) -> Any:
        implementation = self.load(entry)
        chosen_options = self.options(entry)
        with blame(entry.id):
            built = implementation(chosen_options, setup)
            if advice := discovery.outdated(entry):
                if entry not in self._aged:
                    self._aged.add(entry)
                    logger.warning("plugin %s is %s", entry.id, advice)
                built = import_object(KINDS[entry.kind].earlier)(built)
            return self.checked(entry, built, setup)

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
        else to all of them if they are a few of one kind, or else to their distribution. Commands
        are left out, because everything else runs in their frames."""
        chosen = {decision.winner for decision in self.decisions.values()}
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
            distribution = f"{ours[0].distribution} {ours[0].version}"
            names = sorted({entry.name for entry in ours})
            are_alike = len({entry.kind for entry in ours}) == 1 and len(names) <= FEW
            owners[module] = (
                f"{ours[0].kind}:{'/'.join(names)} ({distribution})" if are_alike else distribution
            )
        return owners

    def describe_decisions(self) -> list[dict[str, Any]]:
        """Return every choice of this process as plain data: the need, the winner and why it won,
        and what stopped the others."""
        return [decision.describe() for _, decision in sorted(self.decisions.items())]
