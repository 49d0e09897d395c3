"""Specs of this package."""

from pegboard.interfaces.collective import CollectiveSpec

GLOO = CollectiveSpec(
    api="1.0",
    implementation="pegboard_collective_torch.groups:gloo",
    platforms=frozenset({"cpu"}),
    supports={"hosts": True},
)
NCCL = CollectiveSpec(
    api="1.0",
    implementation="pegboard_collective_torch.groups:nccl",
    platforms=frozenset({"cuda", "rocm"}),
    tier="tuned",
    supports={"hosts": True},
)
