"""Frequencies of the rotary embedding, compared with transformers' functions, and with formulas for
rules that it lacks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.ernie4_5_vl_moe.configuration_ernie4_5_vl_moe import (
    Ernie4_5_VLMoeTextConfig,
)
from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import (
    Ernie4_5_VLMoeTextRotaryEmbedding,
)
from transformers.models.hunyuan_vl.configuration_hunyuan_vl import HunYuanVLTextConfig
from transformers.models.hunyuan_vl.modeling_hunyuan_vl import HunYuanVLRotaryEmbedding
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

from pegboard.errors import ModelError
from pegboard_models.rope import rope_frequencies, scaled_rope
from pegboard_testing.fake_build import fake_build

DIM = 16
BASE = 500.0
LENGTH = 64
RULES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0 + i / 8 for i in range(8)],
        "long_factor": [1.0 + i for i in range(8)],
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("kind", RULES)
def test_frequencies_equal_those_of_transformers(kind: str) -> None:
    scaling = {"rope_type": kind, **RULES[kind]}
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": BASE, **scaling},
    )
    expected, magnitude = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=2 * LENGTH)
    found, own_magnitude = rope_frequencies(DIM, BASE, scaling, LENGTH)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert own_magnitude == pytest.approx(magnitude)


def test_the_frequencies_without_a_rule() -> None:
    found, magnitude = rope_frequencies(DIM, BASE, {}, LENGTH)
    assert (
        found.tolist() == pytest.approx([BASE ** (-2 * i / DIM) for i in range(DIM // 2)])
        and magnitude == 1
    )


@pytest.mark.parametrize("mixed", [None, 0.625])
def test_fixed_and_mixed_ntk(mixed: float | None) -> None:
    """Channel m is divided by k^(m · 2/d) with m from 1 (fixed), or by exp(a · m^b), of which the
    last is k (mixed)."""
    scaling = {"rope_type": "ntk", "factor": 4.0, "mixed_b": mixed}
    found, _ = rope_frequencies(DIM, BASE, scaling, LENGTH)
    plain = [BASE ** (-2 * i / DIM) for i in range(DIM // 2)]
    half = DIM // 2
    growth = math.log(4.0) / half ** (mixed or 1.0)
    divisors = [math.exp(growth * m ** (mixed or 1.0)) for m in range(1, half + 1)]
    assert found.tolist() == pytest.approx(
        [one / by for one, by in zip(plain, divisors, strict=True)], rel=1e-5
    )
    assert plain[-1] / found[-1].item() == pytest.approx(4.0, rel=1e-5)


def test_dynamic_scaling_with_a_fixed_alpha() -> None:
    found, _ = rope_frequencies(
        DIM, BASE, {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}, LENGTH
    )
    base = BASE * 1000 ** (DIM / (DIM - 2))
    assert found.tolist() == pytest.approx(
        [base ** (-2 * i / DIM) for i in range(DIM // 2)], rel=1e-5
    )


@pytest.mark.parametrize(
    ("factors", "magnitude"),
    [
        (
            {"mscale": 0.7, "mscale_all_dim": 1.0},
            (0.07 * math.log(4) + 1) / (0.1 * math.log(4) + 1),
        ),
        ({"mscale": 0.7}, 0.07 * math.log(4) + 1),
        ({}, 0.1 * math.log(4) + 1),
    ],
)
def test_deepseek_yarn(factors: dict[str, float], magnitude: float) -> None:
    own = {"factor": 4.0, "original_max_position_embeddings": 16, **factors}
    found, own_magnitude = rope_frequencies(
        DIM, BASE, {"rope_type": "deepseek_yarn", **own}, LENGTH
    )
    yarn, _ = rope_frequencies(DIM, BASE, {"rope_type": "yarn", **own}, LENGTH)
    assert torch.equal(found, yarn) and own_magnitude == pytest.approx(magnitude)


SECTIONS = [4, 2, 2]
SEVERAL: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mrope": (Qwen2VLTextConfig, Qwen2VLRotaryEmbedding, {"mrope_section": SECTIONS}),
    "ernie45_vl": (
        Ernie4_5_VLMoeTextConfig,
        Ernie4_5_VLMoeTextRotaryEmbedding,
        {"mrope_section": [3, 3, 2]},
    ),
    "xdrope": (
        HunYuanVLTextConfig,
        HunYuanVLRotaryEmbedding,
        {"mrope_section": SECTIONS, "alpha": 1000.0, "factor": 1.0},
    ),
}
"""Rules that give a token several positions: what transformers has for them, and the settings of a
checkpoint."""


@pytest.mark.parametrize("kind", SEVERAL)
def test_rules_with_several_positions_for_a_token_of_text(kind: str) -> None:
    """All positions of a token of text are the same. Compared is each channel's cosine and sine, as
    the model uses them."""
    make_config, make_rope, own = SEVERAL[kind]
    known = {"rope_theta": BASE, "rope_type": "dynamic" if kind == "xdrope" else "default", **own}
    config = make_config(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=DIM,
        max_position_embeddings=LENGTH,
        rope_parameters=known,
    )
    positions = torch.arange(LENGTH)
    rope = make_rope(config)
    cos, sin = rope(
        torch.zeros(1, 1, 1), positions.expand(1, 1, -1).expand(len(own["mrope_section"]), 1, -1)
    )
    mine = scaled_rope(
        fake_build(), DIM, max_positions=LENGTH, base=BASE, scaling={"rope_type": kind, **own}
    )
    mine.bind()
    # this model rotates channel 2i with 2i + 1, others with i + DIM / 2
    pairs = kind == "ernie45_vl"
    for found, expected in zip(mine.forward(positions), (cos, sin), strict=True):
        wide = found.repeat_interleave(2, -1) if pairs else torch.cat([found, found], -1)
        torch.testing.assert_close(wide, expected.view(LENGTH, DIM), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["dual_chunk", "mllama4", "unheard_of"])
def test_other_rules_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ModelError, match=f"'{kind}' is not supported; known: default, linear"):
        rope_frequencies(DIM, BASE, {"rope_type": kind}, LENGTH)
