"""The backend passes the contract of its kind with a stand-in for the library, and the generic
contract."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from typing import Any

import pytest
import torch
from pegboard_attention_flash_attn import backend, probe
from pegboard_attention_flash_attn.backend import FlashAttention
from pegboard_attention_flash_attn.plugin import FLASH_ATTN

from pegboard.errors import ConfigError
from pegboard.interfaces.attention import AttentionLayer, AttentionNeed, AttentionSetup
from pegboard.interfaces.spec import Absent, Broken, Ok, ProbeFacts
from pegboard_testing import fake_flash_attn
from pegboard_testing.contract_attention import AttentionContract, Piece
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_limits import fake_limits

LAYER = AttentionLayer(layer_index=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)


def test_contract() -> None:
    check_entry(installed_entry("attention", "flash_attn"))


class TestFlashAttention(AttentionContract):
    spec = FLASH_ATTN

    @pytest.fixture(autouse=True)
    def library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = fake_flash_attn.install(monkeypatch, backend)

    def backend(self, setup: AttentionSetup) -> FlashAttention:
        return FlashAttention(None, setup)

    def test_lengths_are_those_of_the_step(self) -> None:
        """The library divides its work by them. Larger ones would be right, and slower."""
        trial, _ = self.random_trial(7)
        row = max(range(len(trial.lengths)), key=lambda index: trial.lengths[index])
        length = trial.lengths[row]
        trial.step([Piece(row, 0, length)])
        assert {call["max_seqlen_q"] for call in self.calls} == {length}
        assert {call["max_seqlen_k"] for call in self.calls} == {length}

    def test_tokens_after_the_last_row_give_zeros(self) -> None:
        trial, _ = self.random_trial(8)
        inputs = trial.inputs([Piece(0, 0, 1)])
        padded = inputs.slot_mapping.new_full((3,), -1)
        padded[:1] = inputs.slot_mapping
        inputs.slot_mapping = padded
        trial.backend.plan(inputs)
        q, k, v = (each[0][0][:1].expand(3, -1, -1) for each in (trial.q, trial.k, trial.v))
        result = trial.calls[0](q, k, v)
        assert result.isfinite().all() and not result[1:].any()


@pytest.mark.parametrize(
    ("installed", "kernels", "verdict"),
    [
        ("2.8.3", True, Ok({"flash-attn": "2.8.3"})),
        ("2.10.0.post1", True, Ok({"flash-attn": "2.10.0.post1"})),
        ("2.5.9", True, Broken("flash-attn 2.5.9 is too old: 2.6 or newer is needed")),
        ("2.8.3", False, Broken("flash-attn 2.8.3 was installed without its kernels for CUDA")),
        (
            None,
            False,
            Absent("flash-attn is not installed: install the library flash-attn"),
        ),
    ],
)
def test_probe(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, kernels: bool, verdict: Any
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(probe, "version", version)
    monkeypatch.setattr(probe, "find_spec", lambda name: object() if kernels else None)
    assert probe.probe(ProbeFacts("x86_64")) == verdict


def test_a_cache_of_another_type_is_refused() -> None:
    assert probe.suits(AttentionNeed(dtype="bfloat16", kv_dtype="bfloat16")) == []
    assert probe.suits(AttentionNeed(dtype="bfloat16")) == []
    assert probe.suits(AttentionNeed(dtype="bfloat16", kv_dtype="float16")) == [
        "a cache of float16 cannot be read with queries of bfloat16"
    ]


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ConfigError, match="needs compute capability 8.0 or higher, .* has 7.5"):
        FlashAttention(None, AttentionSetup((LAYER,), "float16", "cuda:0", fake_limits()))


def test_values_of_another_width_are_refused() -> None:
    narrow = replace(LAYER, value_dim=8)
    with pytest.raises(ConfigError, match="keys of 16 channels and values of 8"):
        FlashAttention(None, AttentionSetup((narrow,), "float16", "cpu", fake_limits()))
