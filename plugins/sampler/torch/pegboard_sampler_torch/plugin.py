"""The spec of the sampler `torch`."""

from __future__ import annotations

from pegboard.interfaces.sampler import SamplerSpec
from pegboard.interfaces.spec import BATCH_INVARIANT

TORCH = SamplerSpec(
    api="1.0",
    implementation="pegboard_sampler_torch.sampler:TorchSampler",
    flags=frozenset({BATCH_INVARIANT}),
)
