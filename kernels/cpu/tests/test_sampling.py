"""The contract of the op `sample_tokens`."""

from __future__ import annotations

import pytest
from pegboard_kernel_cpu.sampling import sample_tokens
from torch import Tensor

from pegboard_testing.contract_sample_tokens import SampleTokensContract

pytestmark = pytest.mark.usefixtures("native")


class TestNativeSampleTokens(SampleTokensContract):
    @staticmethod
    def sample(*arguments: Tensor | None) -> Tensor:
        return sample_tokens(*arguments)  # type: ignore[arg-type]
