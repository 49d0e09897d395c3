"""Runs the enabled hook plugins, each one isolated from the others. pluggy checks names and arguments at registration.

We register one by one under the name "distribution:entry point", sorted, and never use pluggy's bulk loader (eager, one
ImportError aborts all, entries of one name overwrite each other).
"""

from __future__ import annotations

import inspect
from collections.abc import MutableMapping
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from pegboard import env
from pegboard.errors import PluginBroken, PluginFailure
from pegboard.interfaces import hooks as hookspecs
from pegboard.log import get_logger
from pegboard.plugins.discovery import Entry
from pegboard.plugins.importing import import_part
from pegboard.plugins.names import did_you_mean
from pegboard.plugins.registry import Registry

if TYPE_CHECKING:
    from pegboard.interfaces.hooks import Finding, LoadedModel, Role

logger = get_logger(__name__)

_PREFIX = "pegboard_"
HOOK_NAMES = tuple(sorted(name for name in vars(hookspecs) if name.startswith(_PREFIX)))
_MISSING = object()


@dataclass(frozen=True, slots=True)
class Amendment:
    """One setting a hook changed; `plugin` is "distribution:name"."""

    plugin: str
    field: str
    before: Any
    after: Any


class _PrefixedHooks(pluggy.PluginManager):
    """Takes every routine named `pegboard_…` for a hook, so that plugins need no decorator and import nothing."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        routine = name.startswith(_PREFIX) and inspect.isroutine(inspect.getattr_static(plugin, name, None))
        return {} if routine else None

    def parse_hookspec_opts(self, module_or_class: object, name: str) -> Any:
        return {} if name in HOOK_NAMES else None


class Hooks:
    """The hooks of one process."""

    def __init__(self, registry: Registry) -> None:
        """Import and register what is enabled. A plugin that does not import or names an unknown hook was asked for by
        being enabled, so it is an error: PluginBroken."""
        self._manager = _PrefixedHooks("pegboard")
        self._manager.add_hookspecs(hookspecs)
        self._entries: dict[str, Entry] = {}
        self.quarantined: dict[str, str] = {}
        for entry in registry.enabled_hooks():
            registry.verify_version(entry)
            self._register(entry, import_part(entry, entry.value, "hooks"))

    @property
    def names(self) -> list[str]:
        """Registered plugins as "distribution:name", without the quarantined ones."""
        return [name for name in self._entries if name not in self.quarantined]

    def _register(self, entry: Entry, plugin: object) -> None:
        if inspect.isclass(plugin):
            raise PluginBroken(f"{entry.id}: {entry.value!r} is a class, expected an object or a module", plugin=entry.id)
        try:
            self._manager.register(plugin, name=entry.qualified)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            raise PluginBroken(f"{entry.id}: {_explain(plugin, error)}", plugin=entry.id) from error
        except ValueError as error:  # the same object under two names
            raise PluginBroken(f"{entry.id}: {error}", plugin=entry.id) from error
        self._entries[entry.qualified] = entry

    def call(self, hook: str, **argument: Any) -> list[tuple[str, Any]]:
        """Call every implementation of a hook in the order of names; [(plugin, what it returned)] without None."""
        results = []
        for implementation in sorted(getattr(self._manager.hook, hook).get_hookimpls(), key=lambda item: item.plugin_name):
            result = self._call_one(implementation, argument)
            if result is not None:
                results.append((implementation.plugin_name, result))
        return results

    def _call_one(self, implementation: Any, argument: dict[str, Any]) -> Any:
        name = implementation.plugin_name
        if name in self.quarantined:
            return None
        try:
            return implementation.function(*(argument[wanted] for wanted in implementation.argnames))
        except Exception as error:  # noqa: BLE001  one plugin's failure must not reach the others or us
            self._quarantine(name, implementation.function.__name__, error)
            return None

    def _quarantine(self, name: str, hook: str, error: Exception) -> None:
        entry = self._entries[name]
        reason = f"{hook} raised {type(error).__name__}: {error}"
        if env.strict():
            raise PluginFailure(f"{entry.id}: {reason} (PEGBOARD_STRICT=1)", plugin=entry.id) from error
        self.quarantined[name] = reason
        logger.warning("plugin %s is left out from now on: %s", entry.id, reason)

    # --- the hooks, one method each --------------------------------------------------------------------------------------

    def doctor_checks(self) -> list[Finding]:
        """Findings of all plugins."""
        return [finding for _, findings in self.call("pegboard_doctor_checks") for finding in findings]

    def amend_config(self, draft: MutableMapping[str, Any]) -> list[Amendment]:
        """Let each plugin change `draft` in place; what changed, by whom. Changes of a plugin that raises are undone."""
        amendments = []
        hook = self._manager.hook.pegboard_amend_config
        for implementation in sorted(hook.get_hookimpls(), key=lambda item: item.plugin_name):
            before = deepcopy(dict(draft))
            self._call_one(implementation, {"draft": draft})
            if implementation.plugin_name in self.quarantined:
                draft.clear()
                draft.update(before)
                continue
            for field in sorted({*before, *draft}):
                old, new = before.get(field, _MISSING), draft.get(field, _MISSING)
                if old is _MISSING or new is _MISSING or old != new:
                    shown = [None if value is _MISSING else deepcopy(value) for value in (old, new)]
                    amendments.append(Amendment(implementation.plugin_name, field, *shown))
        return amendments

    def role_started(self, role: Role) -> None:
        self.call("pegboard_role_started", role=role)

    def role_stopping(self, role: Role) -> None:
        self.call("pegboard_role_stopping", role=role)

    def model_loaded(self, model: LoadedModel) -> None:
        self.call("pegboard_model_loaded", model=model)


def _explain(plugin: object, error: Exception) -> str:
    named = [name for name in dir(plugin) if name.startswith(_PREFIX) and callable(getattr(plugin, name))]
    unknown = [name for name in named if name not in HOOK_NAMES]
    if unknown:
        return f"there is no hook {unknown[0]!r}{did_you_mean(unknown[0], HOOK_NAMES)}"
    return " ".join(str(error).split())
