"""`pegboard check MODEL`: says whether a model runs here, with which plugins and how much memory,
without starting an engine."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from pegboard.errors import ModelError, PegboardError
from pegboard.interfaces.command import CommandSetup
from pegboard.interfaces.platform import Platform, PlatformSetup
from pegboard.interfaces.spec import Need
from pegboard_doctor.cost import program_kilobytes

if TYPE_CHECKING:
    from pegboard.config.schema import Settings
    from pegboard.interfaces.weight_loader import Checkpoint
    from pegboard.plugins.registry import Registry

FLOAT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FLOATS = frozenset({*FLOAT_BYTES, "f32", "bf16", "f16"})
"""What weight loaders call these types in files: torch's names, and GGUF's in small letters."""


class Check:
    """The command `check`."""

    def __init__(self, options: None, setup: CommandSetup) -> None:
        self._parser = setup.parser(
            prog="pegboard check",
            description=(
                "Say whether a model runs here, with which plugins and how much memory. Takes the "
                "flags of an engine."
            ),
        )
        self._parser.add_settings("engine", "plugins")
        self._parser.add_argument(
            "--json", action="store_true", dest="as_json", help="machine-readable output"
        )

    def run(self, words: Sequence[str]) -> int:
        """Return 0 if the model runs, or 1 if it does not."""
        settings, arguments = self._parser.parse_settings(words)
        facts: dict[str, str] = {}
        try:
            for name, value in examine(settings):
                facts[name] = value
                _show(name, value, not arguments.as_json)
        except PegboardError as error:
            verdict = {"runs": "no", "why": str(error)}
        else:
            verdict = {"runs": "yes"}
        for name, value in verdict.items():
            _show(name, value, not arguments.as_json)
        if arguments.as_json:
            print(json.dumps({**verdict, **facts}, indent=2, ensure_ascii=False))
        return 0 if verdict["runs"] == "yes" else 1


def _show(name: str, value: str, is_text: bool) -> None:
    if is_text:
        print(f"{name:<9} {value}", flush=True)


def examine(settings: "Settings") -> Iterator[tuple[str, str]]:
    """Yield what is known about running a model, as topic and text, as soon as it is known: what
    the files say first, because the rest needs torch, whose import takes seconds. Every choice is
    the engine's own: the model is built without its weights. Raises PegboardError if the model does
    not run, with the reason."""
    from pegboard.plan.engine_plan import make_tokenizer, resolve

    plan, registry = resolve(settings)
    checkpoint = plan.checkpoint
    yield "model", f"{checkpoint.path} ({', '.join(checkpoint.architectures)}, {checkpoint.format})"
    platform = _platform(registry, settings)
    stored = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    free = platform.memory().free_bytes
    weights = _weight_bytes(checkpoint, settings.engine.dtype, platform)
    yield (
        "weights",
        f"{_size(stored)} in the files, {_size(weights)} in memory, of {_size(free)} that are free",
    )
    if weights > free:
        raise ModelError(f"the weights take {_size(weights)}, and {_size(free)} are free")
    from pegboard.engine.build import choose_for_model  # imports torch
    from pegboard.engine.kv.plan import capacity

    kv_plan, limits, names = choose_for_model(plan, registry, weights)
    if not plan.settings.engine.skip_tokenizer_init:
        make_tokenizer(registry, plan)
    winners = [
        decision.winner for decision in registry.decisions.values() if decision.winner is not None
    ]
    plugins = {
        w.id if w.kind != "kernel" else f"kernels ({w.distribution} {w.version})": None
        for w in winners
    }
    yield "plugins", ", ".join(plugins)
    if left := checkpoint.tensors.keys() - names:
        yield "left out", _left_out(left, checkpoint.config)
    kv_bytes = kv_plan.num_blocks * kv_plan.block_bytes
    yield "KV cache", f"{_size(kv_bytes)} for {capacity(kv_plan)}"
    memory = weights + kv_bytes + program_kilobytes() * 1024
    yield (
        "memory",
        (
            f"about {_size(memory)} for weights, KV cache and the program itself; what a step "
            "computes with comes on top"
        ),
    )
    yield "context", f"{limits.max_model_len:,} tokens"


def _left_out(names: Set[str], config: Mapping[str, Any]) -> str:
    """Say which tensors of the checkpoint the model does not read, by the first parts of their
    names."""
    groups = Counter(
        name.partition(".")[0] if not name.startswith("model.") else ".".join(name.split(".")[:2])
        for name in names
    )
    shown = ", ".join(f"{group} ({count})" for group, count in groups.most_common(5))
    others = [what for what in ("vision", "audio") if f"{what}_config" in config]
    only = f"; only its text is served, without {' and '.join(others)}" if others else ""
    return f"{len(names)} tensors that the model does not read: {shown}{only}"


def _platform(registry: "Registry", settings: "Settings") -> Platform:
    entry = registry.choose("platform", Need(), explicit=settings.engine.device).require()
    platform: Platform = registry.build(entry, PlatformSetup(settings.engine.num_threads))
    return platform


def _weight_bytes(checkpoint: "Checkpoint", dtype: str, platform: Platform) -> int:
    """Return what the weights take in memory: floats have the compute type there, and packed
    weights are taken to keep their size. A quantization while loading makes them smaller."""
    if dtype == "auto":
        dtype = str(platform.defaults(checkpoint.dtype).get("dtype", checkpoint.dtype))
    size = FLOAT_BYTES[dtype]
    return sum(
        math.prod(t.shape) * size if t.stored.lower() in FLOATS else t.num_bytes
        for t in checkpoint.tensors.values()
    )


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"
