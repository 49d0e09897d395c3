"""The backend of latent attention passes its contract under Triton's interpreter, and the generic
contract."""

from __future__ import annotations

import pytest
from pegboard_attention_triton import attention, latent_backend
from pegboard_attention_triton.latent_backend import TritonLatentAttention
from pegboard_attention_triton.plugin import MLA

from pegboard.interfaces.attention import AttentionSetup
from pegboard_testing.contract_attention import Piece
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_invariant_attention import InvariantLatentContract
from pegboard_testing.contract_latent import STORED, LatentContract, LatentTrial, latent_layer

pytestmark = pytest.mark.usefixtures("interpreted_triton")


def test_contract() -> None:
    check_entry(installed_entry("attention", "triton_mla"))


@pytest.mark.sampled(3)
class TestTritonLatentAttention(LatentContract):
    spec = MLA
    # The interpreter takes some 20 ms for each program of a kernel, so rows are short.
    heads = (1, 5, 16, 40)
    long_row = 150
    random_row = 20

    def backend(self, setup: AttentionSetup) -> TritonLatentAttention:
        return TritonLatentAttention(None, setup)

    @pytest.mark.parametrize("stored", ["float32", "bfloat16"])
    def test_new_tokens_are_expanded(self, monkeypatch: pytest.MonkeyPatch, stored: str) -> None:
        """Also after tokens of earlier steps, and where rows have one new token."""
        monkeypatch.setattr(latent_backend, "MOST_SPLIT_TOKENS", 0)
        lengths = [1, 17, 70]
        trial = LatentTrial(self, latent_layer(5, 40, 20, 16, 36), 16, lengths, 3, stored)
        self.check(trial, [Piece(row, 0, -(-length // 2)) for row, length in enumerate(lengths)])
        self.check(trial, [Piece(1, 9, 10), Piece(2, 35, 69)])
        self.check(trial, [Piece(2, 69, 70)])


class TestInvariantTritonLatentAttention(InvariantLatentContract):
    """The long row has keys of two runs. Other steps than these would split its keys."""

    contract = TestTritonLatentAttention()
    lengths = (1, 80, 17)

    @pytest.fixture(autouse=True)
    def _short_splits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention, "KEYS_PER_SPLIT", 16)

    @pytest.mark.parametrize(
        "stored",
        [*(pytest.param(stored, marks=pytest.mark.slow) for stored in STORED[:-1]), STORED[-1]],
    )
    def test_a_token_has_the_same_bits_in_every_step(self, stored: str) -> None:
        super().test_a_token_has_the_same_bits_in_every_step(stored)

    @pytest.mark.parametrize(
        "stored",
        [*(pytest.param(stored, marks=pytest.mark.slow) for stored in STORED[1:]), STORED[0]],
    )
    def test_a_token_chooses_the_same_keys_in_every_step(self, stored: str) -> None:
        super().test_a_token_chooses_the_same_keys_in_every_step(stored)
