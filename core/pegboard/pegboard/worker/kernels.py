"""Chooses the implementation of every op and weight format that this rank computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pegboard.errors import ConfigError, ModelError, PegboardError, PluginBroken
from pegboard.installed import Entry
from pegboard.interfaces.kernel import RECORDER, KernelNeed, KernelSpec, key_of
from pegboard.interfaces.spec import BATCH_INVARIANT
from pegboard.ops import INVARIANT, REFERENCES
from pegboard.plugins.registry import Registry


class Kernels(dict[str, Callable[..., Any]]):
    """Maps the name of an op or weight format to its implementation. replay: makes the recorder of
    a kernel plugin; None if there is none. refused: why an op cannot be computed here."""

    replay: Callable[[], Any] | None = None

    def __init__(self, known: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(known)
        self.refused: dict[str, PegboardError] = {}

    def __missing__(self, name: str) -> Callable[..., Any]:
        if name in self.refused:
            raise self.refused[name]
        raise ModelError(f"there is no op {name!r}; known: {', '.join(sorted(self))}")


def choose_kernels(registry: Registry, need: KernelNeed) -> Kernels:
    """Choose the best suitable plugin of the `kernel` kind for everything that core or a plugin
    declares. Where there is none, the reference is used: core's, or that of the plugin which
    declares the name, if it runs on this platform and is batch invariant if this is needed. If it
    does not, the op is refused, with an error for the layer that asks for it."""
    platform = str(need.platform)
    kernels = Kernels(REFERENCES)
    if need.batch_invariant:
        for name in REFERENCES.keys() - INVARIANT:
            del kernels[name]
            kernels.refused[name] = ConfigError(
                f"batch_invariant: no kernel plugin is installed for {name!r}, and the results of "
                "its reference depend on the batch"
            )
    offers = dict[str, list[Entry]]()
    declared: dict[str, Entry] = {}
    for entry in registry.entries("kernel"):
        try:
            spec = registry.spec(entry)
        except PluginBroken as error:
            registry.quarantine(entry, str(error))
            continue
        assert isinstance(spec, KernelSpec)
        key = key_of(entry.name, spec)
        offers.setdefault(key, []).append(entry)
        if spec.declares:
            declared[key] = entry
    for name, entries in offers.items():
        if name != RECORDER and name not in REFERENCES and name not in declared:
            for entry in entries:
                registry.quarantine(
                    entry, f"there is no op {name!r}, and this plugin does not declare it"
                )
            continue
        decision = registry.choose("kernel", need, key=name, among=entries, required=False)
        winner = decision.winner or declared.get(name)
        is_last = decision.winner is None
        if is_last and winner is not None and not registry.runs_on(registry.spec(winner), platform):
            kernels.refused[name] = ModelError(
                f"no kernel plugin computes {name!r} on the platform {platform}\n{decision.table()}"
            )
            continue
        if is_last and need.batch_invariant and not _is_invariant(registry, name, winner):
            kernels.refused[name] = ConfigError(
                f"batch_invariant: no kernel plugin computes {name!r} so that its results do not "
                f"depend on the batch\n{decision.table()}"
            )
            continue
        if winner is not None and name == RECORDER:
            kernels.replay = registry.load(winner)
        elif winner is not None:
            kernels[name] = registry.load(winner)
    return kernels


def _is_invariant(registry: Registry, name: str, winner: Entry | None) -> bool:
    """Return whether the reference of an op is batch invariant. winner: the plugin that declares
    the op; None = core does. Without a recorder, every step is computed in the same way."""
    if winner is None:
        return name in INVARIANT or name == RECORDER
    return BATCH_INVARIANT in registry.spec(winner).flags
