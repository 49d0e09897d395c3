"""What the heads are built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pegboard.errors import ModelError
from pegboard.interfaces.draft import DraftNeed, DraftSource
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard_drafts.sources import language_of, named_by_user


def suits_eagle(need: DraftNeed) -> list[str]:
    """Return why the architecture is not that of an EAGLE head."""
    name = need.architecture
    if name is None or ("Eagle" in name and "Eagle3" not in name):
        return []
    return [f"{name} is no EAGLE head by its name"]


def suits_eagle3(need: DraftNeed) -> list[str]:
    """Return why the architecture is not that of an EAGLE-3 head."""
    name = need.architecture
    return [] if name is None or "Eagle3" in name else [f"{name} is no EAGLE-3 head by its name"]


def eagle(target: Checkpoint, draft: Checkpoint | None) -> DraftSource:
    """Return an EAGLE head, which reads the target's last hidden states. Raises ConfigError,
    ModelError."""
    return DraftSource(_named(target, draft, "eagle", "Eagle"))


def eagle3(target: Checkpoint, draft: Checkpoint | None) -> DraftSource:
    """Return an EAGLE-3 head, which reads the hidden states before three layers. Raises
    ConfigError, ModelError."""
    head = _named(target, draft, "eagle3", "Eagle3")
    return DraftSource(head, _depths(head, language_of(target.config)))


def _named(target: Checkpoint, draft: Checkpoint | None, method: str, prefix: str) -> Checkpoint:
    """Return the head under an architecture's name that no other model has: heads often name the
    architecture that they are made for."""
    draft = named_by_user(draft, method)
    names = draft.architectures or ("LlamaForCausalLM",)
    names = tuple(name if prefix in name else f"{prefix}{name}" for name in names)
    sizes = [language_of(checkpoint.config).get("hidden_size") for checkpoint in (target, draft)]
    if method == "eagle" and sizes[0] != sizes[1]:
        raise ModelError(
            f"{draft.path}: this head reads hidden states of size {sizes[1]}, and those of "
            f"{target.path} have {sizes[0]}; a head fits only the model that it was trained for"
        )
    config = {"target_hidden_size": sizes[0], **draft.config, "architectures": list(names)}
    return replace(draft, architectures=names, config=config)


def _depths(head: Checkpoint, target: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers before which the head reads: those that its config names, or the usual
    ones."""
    settings = head.config.get("eagle_config") or {}
    chosen = settings.get("eagle_aux_hidden_state_layer_ids") if settings else None
    if chosen is None:
        count = target.get("num_hidden_layers")
        if not isinstance(count, int) or count < 5:
            raise ModelError(
                f"{head.path}: an EAGLE-3 head reads before layer 2, the middle one and the third "
                f"from last of a model, and this one has {count} layers; name the layers in "
                "eagle_config of the head"
            )
        return (2, count // 2, count - 3)
    if not isinstance(chosen, list) or not all(isinstance(depth, int) for depth in chosen):
        raise ModelError(
            f"{head.path}: eagle_aux_hidden_state_layer_ids is {chosen!r}; expected a list of "
            "layers"
        )
    return tuple(chosen)
