"""Spec of the weight transfer `shared_memory`."""

from __future__ import annotations

from pegboard.interfaces.weight_transfer import WeightTransferSpec

SHARED_MEMORY = WeightTransferSpec(
    api="1.0",
    implementation="pegboard_weight_transfer_shared_memory.transfer:SharedMemoryTransfer",
    options="pegboard_weight_transfer_shared_memory.options:SharedMemoryOptions",
)
