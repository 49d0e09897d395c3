"""Runs the enabled hook plugins in the order of their long names. If one fails, the others are not
affected."""

from __future__ import annotations

import inspect
from collections.abc import MutableMapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pluggy

from pegboard import env
from pegboard.errors import PluginBroken, PluginFailure, did_you_mean
from pegboard.installed import Entry
from pegboard.interfaces import hooks as hookspecs
from pegboard.log import get_logger
from pegboard.plugins.importing import import_part
from pegboard.plugins.registry import Registry

logger = get_logger(__name__)

_PREFIX = "pegboard_"
HOOKS = tuple(sorted(name for name in vars(hookspecs) if name.startswith(_PREFIX)))
"""The names of all hooks."""


@dataclass(frozen=True, slots=True)
class Amendment:
    """A setting that a hook changed. plugin: "distribution:name"."""

    plugin: str
    field: str
    before: Any
    after: Any


class _PrefixedHooks(pluggy.PluginManager):
    """Takes every routine named `pegboard_…` as a hook, so plugins need no decorator and no
    import."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        routine = name.startswith(_PREFIX) and inspect.isroutine(
            inspect.getattr_static(plugin, name, None)
        )
        return {} if routine else None

    def parse_hookspec_opts(self, module_or_class: object, name: str) -> Any:
        return {} if name in HOOKS else None


class Hooks:
    """The hooks of one process. quarantined: long name → reason, for plugins that failed and are
    left out."""

    def __init__(self, registry: Registry) -> None:
        """Import and register the enabled plugins. Raises PluginBroken if a plugin cannot be
        imported or names an unknown hook, because the user has enabled it."""
        self.quarantined: dict[str, str] = {}
        self._manager = _PrefixedHooks("pegboard")
        self._manager.add_hookspecs(hookspecs)
        self._entries: dict[str, Entry] = {}
        for entry in registry.enabled_hooks():
            registry.verify_version(entry)
            self._register(entry, import_part(entry, entry.value, "hooks"))

    def _register(self, entry: Entry, plugin: object) -> None:
        if inspect.isclass(plugin):
            raise PluginBroken(
                f"{entry.id}: {entry.value!r} is a class, expected an object or a module",
                plugin=entry.id,
            )
        try:
            self._manager.register(plugin, name=entry.qualified)
            self._manager.check_pending()
        except ValueError as error:  # the same object has two names
            raise PluginBroken(f"{entry.id}: {error}", plugin=entry.id) from error
        except pluggy.PluginValidationError as error:
            raise PluginBroken(
                f"{entry.id}: {_explained(plugin, error)}", plugin=entry.id
            ) from error
        self._entries[entry.qualified] = entry

    def call(self, hook: str, *argument: Any) -> list[Any]:
        """Call every implementation of a hook, in the order of long names. Returns their results
        without None."""
        results = [
            self._call_one(implementation, *argument)
            for implementation in self._implementations(hook)
        ]
        return [result for result in results if result is not None]

    def _implementations(self, hook: str) -> list[Any]:
        return sorted(
            getattr(self._manager.hook, hook).get_hookimpls(),
            key=lambda implementation: implementation.plugin_name,
        )

    def _call_one(self, implementation: Any, *argument: Any) -> Any:
        entry = self._entries[implementation.plugin_name]
        if entry.qualified in self.quarantined:
            return None
        try:
            return implementation.function(*argument[: len(implementation.argnames)])
        except Exception as error:
            reason = f"{implementation.function.__name__} raised {type(error).__name__}: {error}"
            if env.strict():
                raise PluginFailure(
                    f"{entry.id}: {reason} (PEGBOARD_STRICT=1)", plugin=entry.id
                ) from error
            self.quarantined[entry.qualified] = reason
            logger.warning(
                "plugin %s is left out from now on: %s", entry.id, reason, exc_info=error
            )

    def amend_config(self, draft: MutableMapping[str, Any]) -> list[Amendment]:
        """Let each plugin change `draft` in place. Returns the changes of all plugins. If a plugin
        raises, its changes are undone."""
        amendments = []
        for implementation in self._implementations("pegboard_amend_config"):
            before = deepcopy(dict(draft))
            self._call_one(implementation, draft)
            if implementation.plugin_name in self.quarantined:
                draft.clear()
                draft.update(before)
            for field in sorted({*before, *draft}):
                old = before.get(field)
                new = draft.get(field)
                if old != new:
                    amendments.append(
                        Amendment(implementation.plugin_name, field, old, deepcopy(new))
                    )
        return amendments


def _explained(plugin: object, error: Exception) -> str:
    unknown = [
        name
        for name in dir(plugin)
        if name.startswith(_PREFIX) and callable(getattr(plugin, name)) and name not in HOOKS
    ]
    if unknown:
        return f"there is no hook {unknown[0]!r}{did_you_mean(unknown[0], HOOKS)}"
    return " ".join(str(error).split())
