"""The spec of the sampler `torch`."""

from __future__ import annotations

from pegboard.interfaces.sampler import SamplerSpec

TORCH = SamplerSpec(
    api="1.0",
    implementation="pegboard_sampler_torch.sampler:TorchSampler",
)
