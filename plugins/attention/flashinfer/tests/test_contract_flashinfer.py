"""The backend passes the contract of its kind with a stand-in for the library, and the generic
contract."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
from pegboard_attention_flashinfer import backend, probe
from pegboard_attention_flashinfer.backend import FlashInferAttention
from pegboard_attention_flashinfer.plugin import FLASHINFER

from pegboard.errors import ConfigError
from pegboard.interfaces.attention import AttentionLayer, AttentionNeed, AttentionSetup
from pegboard.interfaces.spec import Absent, Broken, Ok, ProbeFacts
from pegboard_testing import fake_flashinfer
from pegboard_testing.contract_attention import AttentionContract, Piece, Trial
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_limits import fake_limits

LAYER = AttentionLayer(layer_index=0, num_heads=4, num_kv_heads=2, head_dim=64, scale=0.25)


def test_contract() -> None:
    check_entry(installed_entry("attention", "flashinfer"))


class TestFlashInferAttention(AttentionContract):
    spec = FLASHINFER

    @pytest.fixture(autouse=True)
    def library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend, "WORKSPACE_BYTES", 64)
        self.plans = fake_flashinfer.install(monkeypatch, backend)

    def backend(self, setup: AttentionSetup) -> FlashInferAttention:
        return FlashInferAttention(None, setup)

    def trial(self, *layers: AttentionLayer) -> Trial:
        return Trial(self, layers, 4, [20, 30], 7, "float16")

    def test_decodes_and_other_steps_are_planned_as_such(self) -> None:
        """Once for layers that are equal, and for each kind of layer otherwise."""
        trial = self.trial(
            LAYER, replace(LAYER, layer_index=1), replace(LAYER, layer_index=2, scale=1.0)
        )
        for pieces in ([Piece(0, 0, 19), Piece(1, 0, 29)], [Piece(0, 19, 20), Piece(1, 29, 30)]):
            self.check(trial, pieces, trial.step(pieces))
        assert [plan["kind"] for plan in self.plans] == ["PrefillPlans"] * 2 + ["DecodePlans"] * 2

    def test_blocks_before_a_window_are_not_named(self) -> None:
        trial = self.trial(replace(LAYER, window=5))
        trial.step([Piece(1, 0, 29)])
        trial.step([Piece(1, 29, 30)])
        assert [len(plan["indices"]) for plan in self.plans] == [8, 2]
        assert self.plans[1]["indices"].tolist() == trial.tables[1][6:].tolist()

    def test_a_step_under_way_keeps_its_plan(self) -> None:
        """A step may be planned before the one before it has begun."""
        trial = self.trial(LAYER)
        wrappers = trial.backend.wrappers[backend.LayerKind.of(LAYER)]  # type: ignore[attr-defined]
        trial.step([Piece(0, 0, 20)])
        first = wrappers.current
        trial.step([Piece(1, 0, 30)])
        assert wrappers.current is not first

    def test_tokens_after_the_last_row_give_zeros(self) -> None:
        trial = self.trial(LAYER)
        inputs = trial.inputs([Piece(0, 0, 1)])
        padded = inputs.slot_mapping.new_full((3,), -1)
        padded[:1] = inputs.slot_mapping
        inputs.slot_mapping = padded
        trial.backend.plan(inputs)
        q, k, v = (each[0][0][:1].expand(3, -1, -1) for each in (trial.q, trial.k, trial.v))
        result = trial.calls[0](q, k, v)
        assert result.isfinite().all() and not result[1:].any()


@pytest.mark.parametrize(
    ("installed", "verdict"),
    [
        ("0.5.2", Ok({"flashinfer": "0.5.2"})),
        ("0.2.6.post1", Ok({"flashinfer": "0.2.6.post1"})),
        ("0.1.6", Broken("FlashInfer 0.1.6 is too old: 0.2 or newer is needed")),
        (None, Absent("FlashInfer is not installed: install the library flashinfer-python")),
    ],
)
def test_probe(monkeypatch: pytest.MonkeyPatch, installed: str | None, verdict: Any) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(probe, "version", version)
    assert probe.probe(ProbeFacts("x86_64")) == verdict


def test_a_cache_of_another_type_is_refused() -> None:
    assert probe.suits(AttentionNeed(dtype="bfloat16", kv_dtype="bfloat16")) == []
    assert probe.suits(AttentionNeed(dtype="bfloat16", kv_dtype="float16")) == [
        "a cache of float16 is not read with queries of bfloat16"
    ]


def test_values_of_another_width_are_refused() -> None:
    narrow = replace(LAYER, value_dim=8)
    with pytest.raises(ConfigError, match="keys of 64 channels and values of 8"):
        FlashInferAttention(None, AttentionSetup((narrow,), "float16", "cpu", fake_limits()))
