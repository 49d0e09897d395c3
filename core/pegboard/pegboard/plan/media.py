"""Chooses the processor of images, audio and video."""

from __future__ import annotations

from pegboard.config.schema import Settings
from pegboard.interfaces.spec import Need
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard.log import get_logger
from pegboard.plugins.registry import Registry

log = get_logger(__name__)


def choose_processor(
    registry: Registry, settings: Settings, flags: frozenset[str], checkpoint: Checkpoint
) -> str | None:
    """Return the qualified name of the model's processor, or None if the engine takes only text.
    flags: of the model's spec."""
    if "multimodal" not in flags or settings.engine.skip_tokenizer_init:
        return None
    kind = "multimodal_processor"
    decision = registry.choose(kind, Need(), keys=checkpoint.architectures, required=False)
    if decision.winner is None:
        log.warning(
            "only text is served: no plugin of the kind %s for %s is installed",
            kind,
            checkpoint.architectures[0],
        )
        return None
    return decision.winner.qualified
