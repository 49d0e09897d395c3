"""The compiled ops pass the contract of kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pegboard_kernel_cpu import elementwise

from pegboard_testing.contract_kernel import CASES, KernelContract

pytestmark = pytest.mark.usefixtures("native")


@pytest.mark.parametrize("op", CASES)
class TestOps(KernelContract):
    """dtypes: the specs support float32."""

    dtypes = (torch.float32,)

    @pytest.fixture(autouse=True)
    def _chosen(self, op: str) -> None:
        self.op = op

    def kernel(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(elementwise, self.op)
        return function
