"""`pegboard check MODEL`: says whether a model runs here, with which plugins and how much memory, without starting an engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pegboard.errors import PegboardError
from pegboard.interfaces.platform import PlatformSetup
from pegboard.interfaces.spec import Need

if TYPE_CHECKING:
    from pegboard.config.schema import Settings
    from pegboard.plan.engine_plan import EnginePlan

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
CHOSEN_LATER = ("executor", "sampler", "scheduling_policy", "attention")
"""Kinds that the engine chooses. Here they are chosen for the platform alone, so the engine may still refuse one."""


def main(words: Sequence[str]) -> int:
    """Run the command and return the exit status: 0 if the model runs, or 1 if it does not."""
    from pegboard.cli.flags import FlagParser

    parser = FlagParser(
        prog="pegboard check",
        description="Say whether a model runs here, with which plugins and how much memory. Takes the flags of an engine.",
    )
    parser.add_settings("engine", "plugins")
    parser.add_argument("--json", action="store_true", dest="as_json", help="machine-readable output")
    settings, arguments = parser.parse_settings(words)
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
    """Return what is known about running a model, as text by topic. `runs` is "yes" or "no". Raises PegboardError if it does not
    run, with the reason."""
    from pegboard.plan.engine_plan import resolve

    plan, registry = resolve(settings)
    entry = registry.choose("platform", Need(), explicit=settings.engine.device).require()
    platform = registry.build(entry, PlatformSetup(settings.engine.num_threads))
    for kind in CHOSEN_LATER:
        registry.choose(kind, Need(platform=entry.name), required=False)
    winners = {made.winner.id: None for made in registry.decisions.values() if made.winner is not None}
    facts = {
        "runs": "yes",
        "model": f"{plan.checkpoint.path} ({', '.join(plan.checkpoint.architectures)}, {plan.checkpoint.format})",
        "plugins": ", ".join(winners),
    }
    return facts | _memory(plan, platform.defaults(plan.checkpoint.dtype), platform.memory().free_bytes)


def _memory(plan: "EnginePlan", defaults: Mapping[str, Any], free: int) -> dict[str, str]:
    """Estimate the memory, from the checkpoint's index and its config. Weights take about their size in the files."""
    engine, weights = plan.settings.engine, sum(tensor.num_bytes for tensor in plan.checkpoint.tensors.values())
    budget = engine.kv_cache_memory_bytes or defaults.get("kv_cache_memory_bytes") or max(free - weights, 0)
    dtype = engine.dtype if engine.dtype != "auto" else defaults.get("dtype")
    token = _kv_bytes(plan.checkpoint.config) * BYTES.get(str(dtype), 4)
    facts = {"weights": f"{_size(weights)}, of {_size(free)} that are free"}
    if weights > free:
        facts |= {"runs": "no", "why": f"the weights take {_size(weights)}, and {_size(free)} are free"}
    if token:
        fits = min(int(budget) // token, plan.max_model_len)
        facts["KV cache"] = f"{_size(int(budget))}, at most {_size(token)} per token"
        facts["context"] = f"{fits:,} tokens fit in the KV cache; the model's limit is {plan.max_model_len:,}"
    return facts


def _kv_bytes(config: Mapping[str, Any]) -> int:
    """Return how many keys and values one token has in all layers, or 0 if the config does not tell."""
    text = config["text_config"] if isinstance(config.get("text_config"), Mapping) else config
    layers, heads = text.get("num_hidden_layers"), text.get("num_attention_heads")
    hidden = text.get("hidden_size")
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int) and heads):
        return 0
    head_dim = text.get("head_dim") or hidden // heads
    return 2 * layers * int(text.get("num_key_value_heads") or heads) * int(head_dim)


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} bytes"
