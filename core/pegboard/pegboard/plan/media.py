"""Chooses the processor of images, audio and video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pegboard.config.schema import Settings
from pegboard.errors import ConfigError, brief
from pegboard.interfaces.multimodal_processor import MultiModalProcessorSpec
from pegboard.interfaces.spec import Need
from pegboard.interfaces.weight_loader import Checkpoint
from pegboard.log import get_logger
from pegboard.plugins.registry import Registry

log = get_logger(__name__)

MODALITIES = ("image", "audio", "video")
PARTS = frozenset({"audio_config", "vision_config"})
"""What the configs of models have that take more than text."""
DEFAULT_COUNT = 999
"""How many items of a modality a prompt may have if limit_mm_per_prompt does not say (as vLLM)."""


def check_names(setting: str, values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting with something else than modalities."""
    if unknown := sorted(set(values) - set(MODALITIES)):
        raise ConfigError(f"{setting} has {unknown[0]!r}; expected {', '.join(MODALITIES)}")


def most_items(limits: Mapping[str, Any], modality: str) -> int:
    """Return how many items of a modality a prompt may have. limits: limit_mm_per_prompt. Raises
    ConfigError for a wrong form."""
    check_names("limit_mm_per_prompt", limits)
    value = limits.get(modality, DEFAULT_COUNT)
    count = value.get("count", DEFAULT_COUNT) if isinstance(value, Mapping) else value
    if type(count) is not int or count < 0:
        raise ConfigError(
            f"limit_mm_per_prompt gives {brief(value)} for {modality}; expected a number of items "
            'from 0 on, or {"count": number}'
        )
    return count


def with_encoder(settings: Settings, flags: frozenset[str], checkpoint: Checkpoint) -> Settings:
    """Return the settings that an encoder-decoder model needs. flags: of the model's spec. Raises
    ConfigError for what such a model cannot do."""
    if "encoder_decoder" not in flags:
        return settings
    engine = settings.engine
    name = checkpoint.architectures[0]
    for setting, is_used in (
        ("skip_tokenizer_init", engine.skip_tokenizer_init),
        ("kv_connectors", bool(engine.kv_connectors)),
        ("max_loras", engine.max_loras > 0),
        ("pipeline_parallel_size", engine.pipeline_parallel_size > 1),
        ("decode_context_parallel_size", engine.decode_context_parallel_size > 1),
        ("prefill_context_parallel_size", engine.prefill_context_parallel_size > 1),
        ("enable_prefix_caching", _is_set(settings, "enable_prefix_caching")),
    ):
        if is_used:
            raise ConfigError(
                f"{setting} is not possible with {name}, whose layers attend to the output of an "
                "encoder; leave it out"
            )
    return settings.with_engine(f"the model {name}", enable_prefix_caching=False)


def check_encoder_only(settings: Settings) -> None:
    """Raise ConfigError for what an engine without most of its language model cannot do."""
    engine = settings.engine
    if not engine.mm_encoder_only:
        return
    for setting, is_used in (
        ("kv_connectors", bool(engine.kv_connectors)),
        ("max_loras", engine.max_loras > 0),
        ("pipeline_parallel_size", engine.pipeline_parallel_size > 1),
        ("spec_method", engine.spec_method is not None),
    ):
        if is_used:
            raise ConfigError(
                f"{setting} is not possible with mm_encoder_only, which loads one layer of the "
                "language model; leave it out"
            )


def whole_of(flags: frozenset[str]) -> Literal["items", "prompt"] | None:
    """Return what the model computes as a whole (see `Limits`). flags: of its spec."""
    if "whole_prompt" in flags:
        return "prompt"
    return "items" if "whole_items" in flags else None


def with_processor(settings: Settings, registry: Registry, processor: str | None) -> Settings:
    """Return the settings with the logits processors that a multimodal processor needs."""
    if processor is None:
        return settings
    spec = registry.spec(registry.find("multimodal_processor", processor))
    assert isinstance(spec, MultiModalProcessorSpec)
    names = [*(settings.engine.logits_processors or ())]
    if not (missing := [name for name in spec.logits_processors if name not in names]):
        return settings
    return settings.with_engine(processor, logits_processors=[*names, *missing])


def _is_set(settings: Settings, name: str) -> bool:
    return name in settings.sources and bool(getattr(settings.engine, name))


def choose_processor(
    registry: Registry, settings: Settings, flags: frozenset[str], checkpoint: Checkpoint
) -> str | None:
    """Return the qualified name of the model's processor, or None if the engine takes only text.
    flags: of the model's spec. Raises ConfigError for wrong limits."""
    check_names("default_mm_loras", settings.engine.default_mm_loras)
    for modality in MODALITIES:
        most_items(settings.engine.limit_mm_per_prompt, modality)
    if "multimodal" not in flags and (parts := sorted(PARTS & {*checkpoint.config})):
        log.warning(
            "only text is served: the plugin of %s does not read the checkpoint's %s",
            checkpoint.architectures[0],
            parts[0],
        )
    if "multimodal" not in flags or settings.engine.skip_tokenizer_init:
        return None
    kind = "multimodal_processor"
    decision = registry.choose(
        kind, Need(), keys=checkpoint.architectures, required="encoder_decoder" in flags
    )
    if decision.winner is None:
        log.warning(
            "only text is served: no plugin of the kind %s for %s is installed",
            kind,
            checkpoint.architectures[0],
        )
        return None
    return decision.winner.qualified
