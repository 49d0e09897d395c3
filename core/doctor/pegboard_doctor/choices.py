"""Makes the choices for a model without running it, also those of a machine with another device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast

from pegboard.config.schema import PluginConfig
from pegboard.errors import ConfigError, PegboardError, PluginError, did_you_mean
from pegboard.installed import Entry
from pegboard.interfaces.platform import Device, MemoryNumbers, PlatformSetup, Replay
from pegboard.interfaces.spec import Need
from pegboard.plugins.importing import need_class
from pegboard.plugins.registry import Registry
from pegboard.plugins.selection import Decision

ASSUMED = (
    "assumed: nothing has looked for such a device; its memory is taken to suffice, and its "
    "defaults to be those of a large GPU"
)


class AssumedPlatform:
    """Stands for a platform whose device is not there. Nothing is computed on it. Its memory has
    room for everything."""

    def __init__(self, options: object, setup: PlatformSetup) -> None:
        pass

    def start(self, local_rank: int) -> Device:
        return Device("cpu", 1)

    def memory(self, *, reset_peak: bool = False) -> MemoryNumbers:
        return MemoryNumbers(2**46, 2**46, 0, 0)

    def zeros(self, num_bytes: int) -> NoReturn:
        raise ConfigError("a platform that is assumed has no memory")

    def copies(self) -> None:
        return None

    def replay(self, programs: Callable[[], Replay] | None) -> None:
        return None

    def defaults(self, checkpoint_dtype: str | None) -> Mapping[str, object]:
        """Those of large devices."""
        return {
            "dtype": "float16" if checkpoint_dtype == "float16" else "bfloat16",
            "block_size": 16,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
        }

    def profile(self, path: Path | None) -> None:
        pass


def decide(
    model: str, config: PluginConfig, with_layers: bool = True, device: str | None = None
) -> tuple[Registry, str]:
    """Make the choices for a model. with_layers: also those that depend on its layers. device: the
    name of a platform, whose device is assumed to be there; None = what this machine has. Return
    the registry that holds them, and why the model cannot run ("" if it can)."""
    from pegboard.config.sources import engine_settings
    from pegboard.plan.engine_plan import resolve

    values = {} if device is None else {"device": device}
    plan, registry = resolve(replace(engine_settings(model, values), plugins=config))
    if device is not None:
        registry.assume(registry.find("platform", device), AssumedPlatform)
    platform = registry.choose("platform", Need(), explicit=device, required=False).winner
    kernels(registry, need_of("kernel", (), platform.name if platform else None))
    trouble = ""
    if platform is not None and with_layers:
        from pegboard.engine.build import choose_for_model

        try:
            choose_for_model(plan, registry)
        except PegboardError as error:
            trouble = str(error)
            for place, decision in registry.decisions.items():
                if place[0] == "model":
                    registry.record(replace(decision, notes=(f"this model cannot run: {trouble}",)))
    if device is not None:
        decision = registry.decisions["platform", ""]
        registry.record(replace(decision, rank="assumed", notes=(ASSUMED,)))
    return registry, trouble


def kernels(registry: Registry, need: Need) -> list[Decision]:
    """Choose a kernel for each op and weight format, and the recorder."""
    from pegboard.interfaces.kernel import RECORDER, KernelSpec, key_of

    by_key: dict[str, list[Entry]] = {}
    for entry in registry.entries("kernel"):
        key = entry.name.partition(".")[0]
        with suppress(PluginError):  # the choice reports what is broken
            key = key_of(entry.name, cast(KernelSpec, registry.spec(entry)))
        by_key.setdefault(key, []).append(entry)
    for key, among in sorted(by_key.items()):
        decision = registry.choose("kernel", need, key=key, among=among, required=False)
        if key == RECORDER and decision.winner is not None:
            registry.record(replace(decision, notes=tuple(_not_replayed(registry, need))))
    return [registry.decisions["kernel", key] for key in sorted(by_key)]


def _not_replayed(registry: Registry, need: Need) -> Iterator[str]:
    """The parts of a decode step that no recorder replays, as far as specs tell."""
    yield "not replayed: sampling, which depends on the parameters of each request"
    for entry in registry.entries("attention"):
        with suppress(PluginError):
            spec = registry.spec(entry)
            runs_here = need.platform is None or registry.runs_on(spec, need.platform)
            if runs_here and "replay" not in spec.flags:
                yield (
                    f"not replayed: decode and forward with attention {entry.name}, whose spec "
                    "has no flag 'replay'"
                )
    yield (
        "what else is not replayed depends on the model: the log and GET /v1/pegboard/plugins of "
        "a running engine show it"
    )


def need_of(kind: str, pairs: Sequence[str], platform: str | None) -> Need:
    """Make the kind's Need from KEY=VALUE texts. A value is parsed as JSON if possible and is text
    otherwise."""
    from dataclasses import fields

    wanted = need_class(kind)
    known = [field.name for field in fields(wanted)]
    values: dict[str, Any] = {"platform": platform}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ConfigError(f"--need {pair!r}: expected KEY=VALUE")
        if name not in known:
            advice = did_you_mean(name, known) or "; it has " + ", ".join(known)
            raise ConfigError(f"--need {name}: {kind} has no such need{advice}")
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    try:
        need: Need = wanted(**values)
    except TypeError as error:
        raise ConfigError(f"--need for {kind}: {error}") from error
    return need
