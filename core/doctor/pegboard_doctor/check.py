"""`pegboard check MODEL`: says whether a model runs here, with which plugins and how much memory, without starting an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pegboard.errors import ModelError, PegboardError
from pegboard.interfaces.command import CommandSetup
from pegboard.interfaces.platform import Platform, PlatformSetup
from pegboard.interfaces.spec import Need

if TYPE_CHECKING:
    from pegboard.config.schema import Settings
    from pegboard.plugins.registry import Registry


class Check:
    """The command `check`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._parser = setup.parser(
            prog="pegboard check",
            description="Say whether a model runs here, with which plugins and how much memory. Takes the flags of an engine.",
        )
        self._parser.add_settings("engine", "plugins")
        self._parser.add_argument("--json", action="store_true", dest="as_json", help="machine-readable output")

    def run(self, words: Sequence[str]) -> int:
        """Return 0 if the model runs, or 1 if it does not."""
        settings, arguments = self._parser.parse_settings(words)
        try:
            facts = examine(settings)
        except PegboardError as error:
            facts = {"runs": "no", "why": str(error)}
        if arguments.as_json:
            print(json.dumps(facts, indent=2, ensure_ascii=False))
        else:
            print("\n".join(f"{name:<9} {value}" for name, value in facts.items() if value))
        return 0 if facts["runs"] == "yes" else 1


def examine(settings: "Settings") -> dict[str, str]:
    """Return what is known about running a model, as text by topic. Every choice is the engine's own: the model is built without
    its weights. Raises PegboardError if the model does not run, with the reason."""
    from pegboard.plan.engine_plan import resolve

    plan, registry = resolve(settings)
    checkpoint = plan.checkpoint
    from pegboard.engine.build import choose_for_model  # imports torch; a model that is not there needs no torch
    from pegboard.engine.kv.plan import num_tokens

    weights, free = sum(tensor.num_bytes for tensor in checkpoint.tensors.values()), _free_bytes(registry, settings)
    if weights > free:
        raise ModelError(f"the weights take {_size(weights)}, and {_size(free)} are free")
    kv_plan = choose_for_model(plan, registry, weights)
    winners = [made.winner for made in registry.decisions.values() if made.winner is not None]
    plugins = {w.id if w.kind != "kernel" else f"kernels ({w.distribution} {w.version})": None for w in winners}
    return {
        "runs": "yes",
        "model": f"{checkpoint.path} ({', '.join(checkpoint.architectures)}, {checkpoint.format})",
        "plugins": ", ".join(plugins),
        "weights": f"{_size(weights)} in the files, of {_size(free)} that are free",
        "KV cache": f"{_size(kv_plan.num_blocks * kv_plan.block_bytes)} for {num_tokens(kv_plan):,} tokens",
        "context": f"{plan.max_model_len:,} tokens",
    }


def _free_bytes(registry: "Registry", settings: "Settings") -> int:
    entry = registry.choose("platform", Need(), explicit=settings.engine.device).require()
    platform: Platform = registry.build(entry, PlatformSetup(settings.engine.num_threads))
    return platform.memory().free_bytes


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"
