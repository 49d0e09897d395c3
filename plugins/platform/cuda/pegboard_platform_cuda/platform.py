"""The CUDA platform."""

from __future__ import annotations

import torch

from pegboard_gpus.driver import CUDADriver
from pegboard_gpus.platform import GPUPlatform


class CUDAPlatform(GPUPlatform):
    """NVIDIA GPUs. bfloat16 is there from compute capability 8.0."""

    kind = "CUDA"
    repair = "check the driver with nvidia-smi, install a torch for its version of CUDA"
    driver = CUDADriver

    def has_bfloat16(self) -> bool:
        return torch.cuda.get_device_capability() >= (8, 0)
