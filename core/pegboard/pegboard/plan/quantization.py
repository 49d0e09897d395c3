"""Whether a quantization method can be used for a checkpoint."""

from __future__ import annotations

from typing import cast

from pegboard.errors import ConfigError
from pegboard.installed import Entry
from pegboard.interfaces.quantization import QuantizationNeed, QuantizationSpec
from pegboard.plugins.defaults import default_name
from pegboard.plugins.registry import Registry


def check_quantization(registry: Registry, asked: str | None, stored: str | None) -> None:
    """Choose the plugin of the method, which records the decision. asked: the user's method.
    stored: the checkpoint's; None = its weights are plain. Raises ConfigError if the user's method
    does not fit, and PluginNotFound."""
    plain = default_name("quantization")
    if asked and stored and asked != stored:
        entry = registry.find("quantization", asked)
        is_same = any(
            other.value == entry.value
            for other in registry.entries("quantization")
            if other.name == stored
        )
        spec = cast(QuantizationSpec, registry.spec(entry))
        if not is_same and "online" not in spec.flags and stored not in spec.reads:
            raise ConfigError(
                f"quantization {asked!r} was asked for, but the checkpoint is quantized with "
                f"{stored!r}"
            )
    if (
        asked
        and not stored
        and asked != plain
        and not _is_online(registry, registry.find("quantization", asked))
    ):
        online = [
            entry.name for entry in registry.entries("quantization") if _is_online(registry, entry)
        ]
        raise ConfigError(
            f"quantization {asked!r} only reads checkpoints that it has quantized, and this one "
            "has plain weights; leave the setting out, or name a method that quantizes them at "
            f"start: {', '.join(online) or 'none is installed'}"
        )
    if (method := asked or stored or plain) is not None:
        registry.choose("quantization", QuantizationNeed(), keys=[method])


def _is_online(registry: Registry, entry: Entry) -> bool:
    return "online" in registry.spec(entry).flags
