"""Reads the code of a plugin again when its files change (`plugins.reload`), for development.

What a spec says counts from the start. Objects that exist keep the code that they were built with.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.util import cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegboard.errors import PegboardError
from pegboard.installed import Entry
from pegboard.log import get_logger
from pegboard.plugins.discovery import UNINSTALLED
from pegboard.plugins.importing import import_part, module_name

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from pegboard.interfaces.logits_processor import AddedRow, LogitsProcessor

RELOADED = frozenset({"tool_parser", "reasoning_parser", "logits_processor"})
"""The kinds whose code may change while a server runs."""

logger = get_logger(__name__)


class Reloader:
    """Knows when the files of plugins have changed. A plugin's files are those that were imported
    of its top-level package, or its one file."""

    def __init__(self) -> None:
        self._times: dict[str, dict[str, int]] = {}

    def refresh(self, entry: Entry, path: str) -> bool:
        """Forget a package if a file of it has changed since the last `note`, so that the next
        import runs it. Return whether it has. path: "module:OBJECT" of a part of the plugin."""
        root = module_name(path).partition(".")[0]
        times = self._times.setdefault(root, {})
        news = {file: time for file in times if (time := _time_of(file)) not in (None, times[file])}
        if not news:
            return False
        times.update(news)
        for file in times:
            # bytecode counts as current if the source has the same second and size
            Path(cache_from_source(file)).unlink(missing_ok=True)
        for name in [name for name in sys.modules if name.partition(".")[0] == root]:
            del sys.modules[name]
        importlib.invalidate_caches()
        logger.info("%s has changed: its code is read again", entry.id)
        return True

    def note(self, entry: Entry, path: str) -> None:
        """Remember the times of what is imported now."""
        root = module_name(path).partition(".")[0]
        times = self._times.setdefault(root, {})
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file and name.partition(".")[0] == root and (time := _time_of(file)) is not None:
                times.setdefault(file, time)

    def function(self, entry: Entry, path: str, what: str) -> Callable[..., Any]:
        """Return a function that calls the current one at `path`. Raises PluginBroken if there is
        none."""

        def current() -> Callable[..., Any]:
            self.refresh(entry, path)
            if entry.version == UNINSTALLED:  # its module cannot be imported by name
                import_part(entry, entry.value.partition(":")[0], "file")
            target: Callable[..., Any] = import_part(entry, path, what)
            self.note(entry, path)
            return target

        current()
        return lambda *values: current()(*values)


def _time_of(file: str) -> int | None:
    """Return when a file was changed, or None while an editor replaces it."""
    try:
        return Path(file).stat().st_mtime_ns
    except OSError:
        return None


class ReloadedProcessor:
    """A logits processor that is built again when its code has changed and no request has a row. If
    that fails, the one before stays. Its two attributes count from the start."""

    def __init__(
        self, plugin: str, refresh: Callable[[], bool], make: Callable[[], LogitsProcessor]
    ) -> None:
        self._plugin = plugin
        self._refresh = refresh
        self._make = make
        self.plugin_object = make()
        self._rows: set[int] = set()
        self._is_old = False
        self.argmax_invariant = self.plugin_object.argmax_invariant
        self.host_tokens = getattr(self.plugin_object, "host_tokens", False)

    def update(self, added: Sequence[AddedRow], removed: np.ndarray) -> None:
        """See `pegboard.interfaces.logits_processor.LogitsProcessor`."""
        self._rows.difference_update(removed.tolist())
        self._is_old = self._refresh() or self._is_old
        if self._is_old and not self._rows:
            self._is_old = False
            try:
                self.plugin_object = self._make()
            except PegboardError as error:
                logger.error("%s stays as it was: %s", self._plugin, error)
        self._rows.update(row.row for row in added)
        self.plugin_object.update(added, removed)

    def apply(self, logits: Tensor, *place: Any) -> Tensor:
        """See `pegboard.interfaces.logits_processor.LogitsProcessor`."""
        return self.plugin_object.apply(logits, *place)

    def extend(self, rows: np.ndarray, token_ids: Sequence[Sequence[int]]) -> None:
        """See `pegboard.interfaces.logits_processor.LogitsProcessor`."""
        self.plugin_object.extend(rows, token_ids)
