"""Spec of the LoRA resolver `hub`."""

from __future__ import annotations

from pegboard.interfaces.lora_resolver import LoRAResolverSpec

HUB = LoRAResolverSpec(
    api="1.0",
    implementation="pegboard_lora_resolver_hub.resolver:HubResolver",
    options="pegboard_lora_resolver_hub.options:HubOptions",
)
