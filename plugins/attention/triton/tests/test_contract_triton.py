"""The backend passes the contract of its kind under Triton's interpreter, and the generic
contract."""

from __future__ import annotations

import pytest
from pegboard_attention_triton import attention, probe
from pegboard_attention_triton.backend import TritonAttention
from pegboard_attention_triton.plugin import TRITON

from pegboard.interfaces.attention import AttentionSetup
from pegboard.interfaces.spec import Absent, Ok, ProbeFacts
from pegboard_testing.contract_attention import AttentionContract
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_invariant_attention import InvariantAttentionContract


def test_contract() -> None:
    check_entry(installed_entry("attention", "triton"))


def seeds(count: int, *often: int) -> pytest.MarkDecorator:
    """The seeds below `count`. Those that are not named are tried at night only: the interpreter
    takes some 20 ms for each program of a kernel."""
    return pytest.mark.parametrize(
        "seed",
        [
            pytest.param(seed, marks=() if seed in often else pytest.mark.slow)
            for seed in range(count)
        ],
    )


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("interpreted_triton")
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # where sigmoid is 0
class TestTritonAttention(AttentionContract):
    spec = TRITON
    long_row = 150

    def backend(self, setup: AttentionSetup) -> TritonAttention:
        return TritonAttention(None, setup)

    @pytest.mark.parametrize("seed", [4])
    def test_random_steps_equal_the_reference(self, seed: int) -> None:
        super().test_random_steps_equal_the_reference(seed)

    @pytest.mark.parametrize("seed", [0, 3])
    def test_parts_of_the_keys_give_the_whole(self, seed: int) -> None:
        super().test_parts_of_the_keys_give_the_whole(seed)

    @seeds(24, 1, 2, 3, 5)
    def test_items_are_seen_to_their_end(self, seed: int) -> None:
        super().test_items_are_seen_to_their_end(seed)

    @seeds(6, 2, 5)
    def test_attention_to_the_output_of_an_encoder(self, seed: int) -> None:
        super().test_attention_to_the_output_of_an_encoder(seed)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_every_declared_dtype(self, dtype: str) -> None:
        super().test_every_declared_dtype(dtype)

    @pytest.mark.parametrize("seed", [0])
    def test_rows_do_not_see_their_neighbors(self, seed: int) -> None:
        super().test_rows_do_not_see_their_neighbors(seed)


@pytest.mark.usefixtures("interpreted_triton")
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # where sigmoid is 0
class TestInvariantTritonAttention(InvariantAttentionContract):
    """The long row has keys of two runs. Other steps than these would split its keys."""

    contract = TestTritonAttention()
    lengths = (1, 80, 17)

    @pytest.fixture(autouse=True)
    def _short_splits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention, "KEYS_PER_SPLIT", 16)

    @seeds(6, 1)
    def test_a_token_has_the_same_bits_in_every_step(self, seed: int) -> None:
        super().test_a_token_has_the_same_bits_in_every_step(seed)


def test_it_is_absent_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ProbeFacts("x86_64")
    assert isinstance(probe.probe(facts), Ok)
    monkeypatch.setattr(probe, "find_spec", lambda name: None)
    assert probe.probe(facts) == Absent("triton is not installed: pip install triton")
