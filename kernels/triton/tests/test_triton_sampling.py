"""The op `sample_tokens` under Triton's interpreter, alone and inside the sampler that uses it."""

from __future__ import annotations

import pytest
import torch
from pegboard_kernel_triton import sampling
from torch import Tensor

from pegboard.ops.sampling import sample_tokens
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_sample_tokens import SampleTokensContract

pytestmark = [
    pytest.mark.usefixtures("interpreted_triton", "_many_rows"),
    # infinities and NaN, as in torch
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]


@pytest.fixture
def _many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one program compute several rows, which makes the interpreter faster."""
    monkeypatch.setattr(sampling, "ROWS", 16)


def test_contract() -> None:
    check_entry(installed_entry("kernel", "sample_tokens.triton"))


class TestTritonSampleTokens(SampleTokensContract):
    examples = 8

    @staticmethod
    def sample(*arguments: Tensor | None) -> Tensor:
        return sampling.sample_tokens(*arguments)


def test_a_token_without_weight_is_never_drawn() -> None:
    """Not even by the largest number below 1, and not if the weights before it are tiny."""
    logits = torch.full((3, 70), float("-inf"))
    logits[0, 7] = 1.0
    logits[1, 3] = 0.0
    logits[1, 9] = -80.0
    logits[2, 11:13] = 5.0
    uniforms = torch.tensor([1 - 2**-53, 1 - 2**-53, 0.5], dtype=torch.float64)
    found = sampling.sample_tokens(logits, uniforms, torch.ones(3))
    assert found.tolist() == sample_tokens(logits, uniforms, torch.ones(3)).tolist() == [7, 3, 12]
