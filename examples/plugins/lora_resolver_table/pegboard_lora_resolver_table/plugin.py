"""The spec of the LoRA resolver `table`."""

from __future__ import annotations

from pegboard.interfaces.lora_resolver import LoRAResolverSpec

TABLE = LoRAResolverSpec(
    api="1.0",
    implementation="pegboard_lora_resolver_table.resolver:TableResolver",
    options="pegboard_lora_resolver_table.options:TableOptions",
)
