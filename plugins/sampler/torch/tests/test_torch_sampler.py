from pegboard_sampler_torch.sampler import TorchSampler

from pegboard.interfaces.sampler import Sampler, SamplerSetup
from pegboard.testing.contract_sampler import SamplerContract


class TestTorchSampler(SamplerContract):
    def sampler(self, setup: SamplerSetup) -> Sampler:
        return TorchSampler(None, setup)
