"""The ROCm platform. torch for ROCm calls its devices "cuda"."""

from __future__ import annotations

import re

import torch

from pegboard_gpus.driver import HIPDriver
from pegboard_gpus.platform import GPUPlatform

ARCHITECTURE = re.compile(r"gfx(\d+)([0-9a-f])([0-9a-f])")
"""Major, minor and stepping. The last two are hexadecimal."""


def version_of(architecture: str) -> tuple[int, int, int]:
    """Return the numbers of a name such as "gfx90a:sramecc+:xnack-", or zeros."""
    match = ARCHITECTURE.fullmatch(architecture.partition(":")[0])
    return (int(match[1]), int(match[2], 16), int(match[3], 16)) if match else (0, 0, 0)


class ROCmPlatform(GPUPlatform):
    """AMD GPUs. bfloat16 is there in the data-center line (gfx9…) from gfx90a, and in the others
    from gfx11."""

    kind = "ROCm"
    repair = "check the driver with rocm-smi, install a torch for ROCm"
    driver = HIPDriver

    def is_usable(self) -> bool:
        return torch.version.hip is not None and super().is_usable()

    def has_bfloat16(self) -> bool:
        device = torch.cuda.current_device()
        version = version_of(torch.cuda.get_device_properties(device).gcnArchName)
        return version >= (9, 0, 0xA) and version[0] != 10
