"""What would have to change for a plugin to be chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pegboard.plugins.selection import Candidate, Decision

SETTINGS = {
    "platform": "--device",
    "executor": "--distributed-executor-backend",
    "model_source": "MODEL, as in `hub:org/name`",
    "weight_loader": "--load-format",
    "quantization": "--quantization",
    "attention": "--attention-backend",
    "kv_connector": "--kv-connectors",
    "encoder_connector": "--encoder-connector",
    "weight_transfer": "--weight-transfer",
    "scheduling_policy": "--scheduling-policy",
    "draft": "--spec-method",
    "structured_output": "--structured-outputs-config.backend",
    "logits_processor": "--logits-processors",
    "sampler": "--sampler",
    "tokenizer": "--tokenizer-mode",
    "tool_parser": "--tool-call-parser",
    "reasoning_parser": "--reasoning-parser",
    "pooler": "--pooler",
    "io_processor": "--io-processor-plugin",
    "lora_resolver": "--lora-resolvers",
    "metrics": "--plugins-enable",
    "api": "--plugins-enable",
    "builtin_tool": "--plugins-enable",
    "command": "the word after `pegboard`",
}
"""Kind → the setting that names a plugin. For the others, the checkpoint or the machine decides."""


def change(decision: Decision, candidate: Candidate) -> str:
    """Return what makes this candidate win, or "" if its reason says so: a package to install or to
    upgrade, or a need that it does not meet."""
    entry = candidate.entry
    setting = SETTINGS.get(entry.kind, "")
    if candidate.gate == "allowed":
        return {
            "denied by": f"remove {candidate.reason.partition(' in ')[0][10:]} from plugins.deny",
            "not in": f"add {entry.kind}:{entry.name} to plugins.allow",
            "replaced by": "remove that distribution from plugins.override",
        }[" ".join(candidate.reason.split()[:2])]
    if candidate.gate != "ranked" or candidate.reason.endswith("was asked for"):
        return ""  # nobody has judged whether it would work
    if setting.startswith("--"):
        return f"{setting} {entry.name}"
    better = [
        item.entry
        for item in decision.candidates[: decision.candidates.index(candidate)]
        if item.gate in ("selected", "ranked")
    ]
    return "deny " + ", ".join(f"{item.kind}:{item.name}" for item in better)


def described(decision: Decision) -> dict[str, Any]:
    """Return a decision as plain data, with what would have to change for each candidate."""
    facts = decision.describe()
    for row, candidate in zip(facts["candidates"], decision.candidates, strict=True):
        row["change"] = change(decision, candidate)
    return facts


def difference(there: Decision, choices: Mapping[tuple[str, str], Decision]) -> str:
    """Return why the choice of another machine is not made here, and what would have to change, or
    "" if it is made. choices: what is chosen here, by kind and key."""
    here = choices.get((there.kind, there.key))
    wanted = there.winner.qualified if there.winner else "nothing"
    winner = here.winner.qualified if here and here.winner else "nothing"
    if wanted == winner:
        return ""
    result = f"{winner} is chosen"
    if there.winner is None:
        return result
    if here is None:
        others = [
            f"{other.key} → {other.winner.name if other.winner else 'nothing'}"
            for (kind, _), other in choices.items()
            if kind == there.kind
        ]
        return "this choice is not made" + "".join(f"; instead: {text}" for text in others)
    for item in with_changes(here).candidates:
        if item.entry.qualified == wanted:
            return f"{result}; {item.entry.name} is {item.state}: {item.reason}"
    name = there.winner.distribution
    return f"{result}; {wanted} is not installed: pip install {name}=={there.winner.version}"


def with_changes(decision: Decision) -> Decision:
    """Return a decision whose reasons also say what would have to change."""
    candidates = [
        replace(item, reason=f"{item.reason}; to use it: {what}")
        if (what := change(decision, item))
        else item
        for item in decision.candidates
    ]
    return replace(decision, candidates=tuple(candidates))
