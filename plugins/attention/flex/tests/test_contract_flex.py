"""The backend passes the contract of its kind and the generic contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pegboard_attention_flex import probe
from pegboard_attention_flex.backend import FlexAttention
from pegboard_attention_flex.options import FlexOptions
from pegboard_attention_flex.plugin import FLEX

from pegboard.interfaces.attention import AttentionSetup
from pegboard.interfaces.spec import Broken, Ok, ProbeFacts
from pegboard_testing.contract_attention import AttentionContract
from pegboard_testing.contract_generic import check_entry, installed_entry


def test_contract() -> None:
    check_entry(installed_entry("attention", "flex"))


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """As in an engine."""
    with torch.no_grad():
        yield


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
class TestFlexAttention(AttentionContract):
    spec = FLEX
    long_row = 300

    def backend(self, setup: AttentionSetup) -> FlexAttention:
        return FlexAttention(FlexOptions(), setup)

    @pytest.mark.parametrize("seed", range(8))  # uncompiled, a call takes some milliseconds
    def test_random_steps_equal_the_reference(self, seed: int) -> None:
        super().test_random_steps_equal_the_reference(seed)

    @pytest.mark.parametrize("seed", range(6))
    def test_items_are_seen_to_their_end(self, seed: int) -> None:
        super().test_items_are_seen_to_their_end(seed)


def test_the_torch_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ProbeFacts("x86_64")
    assert isinstance(probe.probe(facts), Ok)
    monkeypatch.setattr(probe, "version", lambda name: "2.8.1+cpu")
    assert probe.probe(facts) == Broken(
        "flex_attention needs torch 2.9 or newer, and 2.8.1+cpu is installed"
    )
