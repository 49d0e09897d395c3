"""Chooses the implementation of every op and weight format that this rank computes with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from pegboard.errors import ModelError, PluginBroken, PluginError
from pegboard.installed import Entry
from pegboard.interfaces.kernel import RECORDER, KernelNeed, KernelSpec, key_of
from pegboard.interfaces.spec import Ok
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


def packed_types(registry: Registry, platform: str) -> list[str]:
    """Return the types of activations that the kernels for packed weights on this platform take,
    the most precise one first. Without such kernels the list is empty: the references take every
    type."""
    dtypes: set[str] = set()
    for entry in registry.entries("kernel"):
        with suppress(PluginError):  # the choice of kernels reports what is broken
            spec = registry.spec(entry)
            assert isinstance(spec, KernelSpec)
            is_packed = (
                spec.provides == "weight_format" and key_of(entry.name, spec) != "float_weight"
            )
            if (
                is_packed
                and registry.runs_on(spec, platform)
                and isinstance(registry.verdict(entry), Ok)
            ):
                declared = spec.supports.get("dtype", ())
                dtypes.update(
                    map(str, declared) if isinstance(declared, set | frozenset | tuple) else ()
                )
    return sorted(dtypes, key=lambda name: (name != "float32", name))
