"""Contract tests of core's own float weight."""

from __future__ import annotations

import torch

from pegboard.ops.linear import FloatWeight
from pegboard_testing.contract_float_weight import FloatWeightContract


class TestFloatWeight(FloatWeightContract):
    weight_class = FloatWeight

    def test_other_types_stay_plain(self) -> None:
        values = torch.randn(16, 16, dtype=torch.bfloat16)
        weight = self.filled(values)
        x = torch.randn(2, 16, dtype=torch.bfloat16)
        assert weight.plain() is weight.plain()
        assert torch.equal(weight.bind()(x), torch.nn.functional.linear(x, values))
