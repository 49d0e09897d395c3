"""Runs the enabled hook plugins, each one isolated from the others, in the order of their long names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, MutableMapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pegboard import env
from pegboard.errors import PluginBroken, PluginFailure
from pegboard.interfaces import hooks as hookspecs
from pegboard.log import get_logger
from pegboard.plugins.discovery import Entry
from pegboard.plugins.importing import import_part
from pegboard.plugins.names import did_you_mean
from pegboard.plugins.registry import Registry

logger = get_logger(__name__)

PREFIX = "pegboard_"
ARGUMENTS = {
    name: tuple(inspect.signature(function).parameters)
    for name, function in vars(hookspecs).items()
    if name.startswith(PREFIX)
}  # fmt: skip
"""Hook → the names of its arguments, none or one."""

_MISSING = object()


@dataclass(frozen=True, slots=True)
class Amendment:
    """One setting a hook changed; `plugin` is "distribution:name"."""

    plugin: str
    field: str
    before: Any
    after: Any


class Hooks:
    """The hooks of one process. quarantined: plugins left out since they failed, by long name, and why."""

    def __init__(self, registry: Registry) -> None:
        """Import and check what is enabled. Enabling is asking, so a plugin that does not import or names an unknown hook is an
        error: PluginBroken."""
        self.quarantined: dict[str, str] = {}
        self._functions: dict[str, dict[Entry, Callable[..., Any]]] = {name: {} for name in ARGUMENTS}
        for entry in sorted(registry.enabled_hooks(), key=lambda entry: entry.qualified):
            registry.verify_version(entry)
            for name, function in _hooks_of(entry, import_part(entry, entry.value, "hooks")):
                self._functions[name][entry] = function

    def call(self, hook: str, *argument: Any) -> list[Any]:
        """Call every implementation of a hook; what they returned, without None."""
        results = [self._call_one(hook, entry, *argument) for entry in self._functions[hook]]
        return [result for result in results if result is not None]

    def _call_one(self, hook: str, entry: Entry, *argument: Any) -> Any:
        if entry.qualified in self.quarantined:
            return None
        function = self._functions[hook][entry]
        try:
            return function(*argument[: len(inspect.signature(function).parameters)])
        except Exception as error:
            reason = f"{hook} raised {type(error).__name__}: {error}"
            if env.strict():
                raise PluginFailure(f"{entry.id}: {reason} (PEGBOARD_STRICT=1)", plugin=entry.id) from error
            self.quarantined[entry.qualified] = reason
            logger.warning("plugin %s is left out from now on: %s", entry.id, reason)

    def amend_config(self, draft: MutableMapping[str, Any]) -> list[Amendment]:
        """Let each plugin change `draft` in place; what changed, by whom. Changes of a plugin that raises are undone."""
        amendments = []
        for entry in self._functions["pegboard_amend_config"]:
            before = deepcopy(dict(draft))
            self._call_one("pegboard_amend_config", entry, draft)
            if entry.qualified in self.quarantined:
                draft.clear()
                draft.update(before)
            for field in sorted({*before, *draft}):
                old, new = before.get(field, _MISSING), draft.get(field, _MISSING)
                if old is _MISSING or new is _MISSING or old != new:
                    shown = [None if value is _MISSING else deepcopy(value) for value in (old, new)]
                    amendments.append(Amendment(entry.qualified, field, *shown))
        return amendments


def _hooks_of(entry: Entry, plugin: object) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of a plugin object or module that are named like hooks. Raises PluginBroken."""
    if inspect.isclass(plugin):
        raise PluginBroken(f"{entry.id}: {entry.value!r} is a class, expected an object or a module", plugin=entry.id)
    for name in dir(plugin):
        function = getattr(plugin, name)
        if not (name.startswith(PREFIX) and callable(function)):
            continue
        if name not in ARGUMENTS:
            raise PluginBroken(f"{entry.id}: there is no hook {name!r}{did_you_mean(name, ARGUMENTS)}", plugin=entry.id)
        wrong = [argument for argument in inspect.signature(function).parameters if argument not in ARGUMENTS[name]]
        if wrong:
            expected = ", ".join(ARGUMENTS[name]) or "none"
            raise PluginBroken(f"{entry.id}: {name} has no argument {wrong[0]!r}, it has {expected}", plugin=entry.id)
        yield name, function
