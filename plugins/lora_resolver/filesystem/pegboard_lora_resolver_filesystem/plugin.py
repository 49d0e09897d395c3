"""Spec of the LoRA resolver `filesystem`."""

from __future__ import annotations

from pegboard.interfaces.lora_resolver import LoRAResolverSpec

FILESYSTEM = LoRAResolverSpec(
    api="1.0",
    implementation="pegboard_lora_resolver_filesystem.resolver:FilesystemResolver",
    options="pegboard_lora_resolver_filesystem.options:FilesystemOptions",
)
