"""Chooses the implementation of every op and weight format that this rank computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pegboard.errors import ModelError, PluginBroken
from pegboard.installed import Entry
from pegboard.interfaces.kernel import RECORDER, KernelNeed, KernelSpec, key_of
from pegboard.ops import REFERENCES
from pegboard.plugins.registry import Registry


class Kernels(dict[str, Callable[..., Any]]):
    """Maps the name of an op or weight format to its implementation. replay: makes the recorder of
    a kernel plugin; None if there is none. refused: why an op that a plugin declares cannot be
    computed here."""

    replay: Callable[[], Any] | None = None

    def __init__(self, known: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(known)
        self.refused: dict[str, str] = {}

    def __missing__(self, name: str) -> Callable[..., Any]:
        if name in self.refused:
            raise ModelError(self.refused[name])
        raise ModelError(f"there is no op {name!r}; known: {', '.join(sorted(self))}")


def choose_kernels(registry: Registry, *, platform: str, dtype: str) -> Kernels:
    """Choose the best suitable plugin of the `kernel` kind for everything that core or a plugin
    declares. Where there is none, the reference is used: core's, or that of the plugin which
    declares the name, if it runs on this platform."""
    kernels = Kernels(REFERENCES)
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
        need = KernelNeed(platform=platform, dtype=dtype)
        decision = registry.choose("kernel", need, key=name, among=entries, required=False)
        winner = decision.winner or declared.get(name)
        if (
            decision.winner is None
            and winner is not None
            and not registry.runs_on(registry.spec(winner), platform)
        ):
            kernels.refused[name] = (
                f"no kernel plugin computes {name!r} on the platform {platform}\n{decision.table()}"
            )
            continue
        if winner is not None and name == RECORDER:
            kernels.replay = registry.load(winner)
        elif winner is not None:
            kernels[name] = registry.load(winner)
    return kernels
