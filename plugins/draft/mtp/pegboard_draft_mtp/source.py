"""What the draft model is built from: the target's own checkpoint, under the architecture of its
layers that predict several tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from pegboard.errors import ConfigError, ModelError
from pegboard.interfaces.draft import DraftSource
from pegboard.interfaces.weight_loader import Checkpoint

COUNT = "num_nextn_predict_layers"
SAME = ("hidden_size", "vocab_size", "num_hidden_layers", "num_layers")
"""Values of the config that a named checkpoint must share with the target."""


@dataclass(frozen=True)
class Family:
    """The layers of one family. architecture: their own. method: vLLM's older name of the method.
    tensors: what the names of their tensors begin with; {} = the number of the model's layers.
    is_counted: whether the config says how many there are."""

    architecture: str
    method: str
    tensors: str = "model.layers.{}."
    is_counted: bool = True


FAMILIES = {
    "DeepseekV3ForCausalLM": Family("DeepSeekMTPModel", "deepseek_mtp"),
    "Ernie4_5_MoeForCausalLM": Family("ErnieMTPModel", "ernie_mtp", "model.mtp_block.0."),
    "Glm4MoeForCausalLM": Family("Glm4MoeMTPModel", "glm4_moe_mtp"),
    "LongcatFlashForCausalLM": Family(
        "LongCatFlashMTPModel", "longcat_flash_mtp", "model.mtp.layers.0.", is_counted=False
    ),
    "MiMoForCausalLM": Family("MiMoMTPModel", "mimo_mtp", "model.mtp_layers.0."),
    "PanguUltraMoEForCausalLM": Family("OpenPanguMTPModel", "pangu_ultra_moe_mtp"),
    "Qwen3NextForCausalLM": Family(
        "Qwen3NextMTP", "qwen3_next_mtp", "mtp.layers.0.", is_counted=False
    ),
}
"""The target's architecture → its layers."""


def mtp(target: Checkpoint, draft: Checkpoint | None, method: str = "mtp") -> DraftSource:
    """Return the checkpoint of the layers: the target's, or another one of the same model. method:
    the user's. Raises ConfigError if the target's architecture is of another method, and ModelError
    if the checkpoint does not have the layers."""
    families = [FAMILIES[name] for name in target.architectures if name in FAMILIES]
    served = [name for name, family in FAMILIES.items() if method in ("mtp", family.method)]
    if not families or method not in ("mtp", families[0].method):
        hint = f"use the method mtp or {families[0].method}" if families else "use another method"
        raise ConfigError(
            f"the method {method} needs a model of {', '.join(served)}; {target.path} has "
            f"{', '.join(target.architectures) or 'no architecture'}; {hint}"
        )
    family = families[0]
    checkpoint = target if draft is None else draft
    if draft is not None:
        _check_same(target, draft)
    _check_layers(checkpoint, family)
    names = (family.architecture,)
    config = {**checkpoint.config, "architectures": list(names)}
    return DraftSource(replace(checkpoint, architectures=names, config=config))


deepseek_mtp = partial(mtp, method="deepseek_mtp")
ernie_mtp = partial(mtp, method="ernie_mtp")
glm4_moe_mtp = partial(mtp, method="glm4_moe_mtp")
longcat_flash_mtp = partial(mtp, method="longcat_flash_mtp")
mimo_mtp = partial(mtp, method="mimo_mtp")
pangu_ultra_moe_mtp = partial(mtp, method="pangu_ultra_moe_mtp")
qwen3_next_mtp = partial(mtp, method="qwen3_next_mtp")


def _check_same(target: Checkpoint, draft: Checkpoint) -> None:
    """Raise ModelError if the named checkpoint is another model."""
    if draft.architectures != target.architectures:
        names = ", ".join(draft.architectures) or "no architecture"
        raise ModelError(
            f"{draft.path} is a model of {names}; the layers of {', '.join(target.architectures)} "
            "are needed: leave out spec_model, or name the same model"
        )
    both = [{name: checkpoint.config.get(name) for name in SAME} for checkpoint in (target, draft)]
    if both[0] != both[1]:
        raise ModelError(
            f"{draft.path} has {both[1]}, and {target.path} has {both[0]}; these layers fit only "
            "the model that they were trained with: leave out spec_model, or name the same model"
        )


def _check_layers(checkpoint: Checkpoint, family: Family) -> None:
    """Raise ModelError if the checkpoint has no such layers."""
    config = checkpoint.config
    count = config.get(COUNT)
    if family.is_counted and (type(count) is not int or count < 1):
        raise ModelError(
            f"{checkpoint.path}: the config has {COUNT}={count!r}; the method needs at least 1 "
            "layer that predicts tokens: use a checkpoint that has them, or another method"
        )
    prefix = family.tensors.format(config.get("num_hidden_layers"))
    names = checkpoint.tensors
    if names and not any(name.startswith(prefix) for name in names):
        raise ModelError(
            f"{checkpoint.path} has no tensors {prefix}…, which the method needs; they were left "
            "out when it was converted: use a checkpoint that has them, or another method"
        )
