"""Specs of the collective plugins `gloo` and `nccl`."""

from __future__ import annotations

from pegboard.interfaces.collective import CollectiveSpec

IMPLEMENTATION = "pegboard_collective_torch.collective:TorchCollective"

GLOO = CollectiveSpec(
    api="1.0",
    implementation=IMPLEMENTATION,
    platforms=frozenset({"cpu"}),
    supports={"hosts": True},
)

NCCL = CollectiveSpec(
    api="1.0",
    implementation=IMPLEMENTATION,
    platforms=frozenset({"cuda", "rocm"}),
    tier="tuned",
    supports={"hosts": True},
)
