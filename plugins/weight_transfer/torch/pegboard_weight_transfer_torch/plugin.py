"""Spec of the weight transfer `torch`, which vLLM calls `nccl`."""

from __future__ import annotations

from pegboard.interfaces.weight_transfer import WeightTransferSpec

TORCH = WeightTransferSpec(
    api="1.0",
    implementation="pegboard_weight_transfer_torch.transfer:TorchTransfer",
    options="pegboard_weight_transfer_torch.options:TorchOptions",
)
