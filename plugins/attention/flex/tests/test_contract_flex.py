"""The backend passes the contract of its kind and the generic contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pegboard_attention_flex import probe
from pegboard_attention_flex.backend import FlexAttention
from pegboard_attention_flex.options import FlexOptions
from pegboard_attention_flex.plan import QUERIES
from pegboard_attention_flex.plugin import FLEX
from torch.nn.attention.flex_attention import flex_attention

from pegboard.interfaces.attention import AttentionSetup
from pegboard.interfaces.spec import Broken, Ok, ProbeFacts
from pegboard_testing.contract_attention import AttentionContract
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_limits import fake_limits


def test_contract() -> None:
    check_entry(installed_entry("attention", "flex"))


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    """As in an engine."""
    with torch.no_grad():
        yield


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
class TestFlexAttention(AttentionContract):
    spec = FLEX
    long_row = 300

    def backend(self, setup: AttentionSetup) -> FlexAttention:
        return FlexAttention(FlexOptions(), setup)

    @pytest.mark.parametrize("seed", range(4))  # uncompiled, a call takes some milliseconds
    def test_random_steps_equal_the_reference(self, seed: int) -> None:
        super().test_random_steps_equal_the_reference(seed)

    @pytest.mark.parametrize("seed", range(3))
    def test_items_are_seen_to_their_end(self, seed: int) -> None:
        super().test_items_are_seen_to_their_end(seed)


@pytest.mark.parametrize("compiles", [False, True])
def test_only_compiled_parts_may_be_long(monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
    """Without compilation, the scores of a part are in memory."""
    functions = []

    def record(function: Any) -> Any:
        functions.append(function)
        return function

    monkeypatch.setattr(torch, "compile", record)
    setup = AttentionSetup((), "float32", "cpu", fake_limits())
    backend = FlexAttention(FlexOptions(compile=compiles), setup)
    assert functions == [flex_attention] * compiles
    assert backend.most_queries == (None if compiles else QUERIES)


def test_the_torch_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ProbeFacts("x86_64")
    assert isinstance(probe.probe(facts), Ok)
    monkeypatch.setattr(probe, "version", lambda name: "2.8.1+cpu")
    assert probe.probe(facts) == Broken(
        "flex_attention needs torch 2.9 or newer, and 2.8.1+cpu is installed"
    )
