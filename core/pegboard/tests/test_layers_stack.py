"""Compares norms, the rotary embedding and the layer stack with their formulas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.layers import Activation, Build, LayerStack, Norm
from pegboard.ops import rope
from pegboard_models.rope import scaled_rope
from pegboard_testing.fake_build import fake_build, load_layers


def test_norm_alone_and_with_a_residual() -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(6, generator=random)
    norm = Norm(fake_build().at("n"), 6, 1e-3)
    load_layers([norm], {"n.weight": weight})
    x = torch.randn(4, 6, generator=random)
    residual = torch.randn(4, 6, generator=random)

    def formula(value: Tensor) -> Tensor:
        return value / (value.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight

    torch.testing.assert_close(norm(x), formula(x))
    total = x + residual
    hidden, kept = norm.add(x, residual)
    torch.testing.assert_close(hidden, formula(total))
    torch.testing.assert_close(kept, total)
    assert kept.data_ptr() == residual.data_ptr(), "the residual is overwritten with the sum"


@settings(max_examples=30, deadline=None)
@given(
    half=st.sampled_from([1, 2, 5]),
    extra=st.sampled_from([0, 3]),
    pairs=st.booleans(),
    position=st.integers(0, 63),
    base=st.sampled_from([100.0, 10000.0]),
)
def test_rope_turns_each_pair_by_its_angle(
    half: int, extra: int, pairs: bool, position: int, base: float
) -> None:
    """Each pair (x_i, x_j) is rotated by position · base^(−2i/d). Channels after the rotary ones do
    not change."""
    layer = scaled_rope(
        fake_build(rope_style="pairs" if pairs else "halves"), 2 * half, max_positions=64, base=base
    )
    layer.bind()
    cos, sin = layer(torch.tensor([position]))
    x = torch.randn(1, 2, 2 * half + extra, generator=torch.Generator().manual_seed(position))
    turned = rope(x.clone(), cos, sin, layer.pairs)
    expected = x.clone()
    for i in range(half):
        angle = position * base ** (-2 * i / (2 * half))
        first, second = (2 * i, 2 * i + 1) if pairs else (i, i + half)
        for head in range(2):
            a = float(x[0, head, first])
            b = float(x[0, head, second])
            expected[0, head, first] = a * math.cos(angle) - b * math.sin(angle)
            expected[0, head, second] = a * math.sin(angle) + b * math.cos(angle)
    torch.testing.assert_close(turned, expected, atol=1e-4, rtol=1e-4)


@given(first=st.integers(0, 40), second=st.integers(0, 40), shift=st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_rope_scores_depend_on_the_distance_alone(first: int, second: int, shift: int) -> None:
    layer = scaled_rope(fake_build(), 8, max_positions=64)
    layer.bind()
    random = torch.Generator().manual_seed(first)
    q = torch.randn(1, 1, 8, generator=random)
    k = torch.randn(1, 1, 8, generator=random)

    def score(at_q: int, at_k: int) -> float:
        turned = [
            rope(x.clone(), *layer(torch.tensor([at])), False) for x, at in ((q, at_q), (k, at_k))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(first, second) == pytest.approx(score(first + shift, second + shift), abs=1e-4)


def test_rope_style_follows_the_checkpoint() -> None:
    assert scaled_rope(fake_build(rope_style="pairs"), 4, max_positions=8).pairs
    assert not scaled_rope(fake_build(), 4, max_positions=8).pairs


def test_an_unknown_scaling_is_refused() -> None:
    with pytest.raises(ModelError, match="'warp'"):
        scaled_rope(fake_build(), 4, max_positions=8, scaling={"rope_type": "warp"})


def test_activation() -> None:
    layer = Activation(fake_build(), "silu")
    layer.bind()
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x.clone()), nn.functional.silu(x[:, :4]) * x[:, 4:])
    with pytest.raises(ModelError, match="'mish'"):
        Activation(fake_build().at("a"), "mish")


# --- the stack ------------------------------------------------------------------------------------


class Step(nn.Module):
    """Computes hidden = previous hidden · 2 + index, and residual = the sum of all earlier ones."""

    def __init__(self, path: str, index: int) -> None:
        super().__init__()
        self.path = path
        self.index = index

    def forward(
        self, hidden: Tensor, residual: Tensor | None, extra: float
    ) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else hidden + residual
        return residual * 2 + self.index + extra, residual


@given(num_layers=st.integers(2, 6), cut=st.integers(1, 5), unit=st.sampled_from([1.0, 0.25]))
def test_parts_of_a_stack_compute_what_the_whole_does(
    num_layers: int, cut: int, unit: float
) -> None:
    """Taps at all depths hand out the sum there, also where the stack is cut."""
    cut = min(cut, num_layers - 1)
    norm = Norm(fake_build().at("norm"), 1, 1.0)
    load_layers([norm], {"norm.weight": torch.tensor([3.0])})

    def stack(layers: range | None) -> tuple[LayerStack, Build]:
        build = replace(fake_build(), layers=layers, taps=(*range(num_layers + 1),))
        at = build.at("layers")
        made = LayerStack(at, num_layers, lambda b, i: Step(b.path, i), norm, unit=unit)
        return made, build

    whole, build = stack(None)
    first, build_of_first = stack(range(cut))
    second, build_of_second = stack(range(cut, num_layers))
    hidden = torch.ones(1, 1)
    assert torch.equal(second(first(hidden.clone(), 0.5), 0.5), whole(hidden.clone(), 0.5))
    residual = None
    total = hidden
    for index in range(num_layers + 1):
        expected = total * unit
        for parts in (build, build_of_first if index <= cut else build_of_second):
            assert torch.equal(parts.declared.taps[index], expected)
        hidden, residual = Step("", index)(hidden, residual, 0.5)
        total = hidden + residual
    assert [layer.path for layer in second.layers] == [
        f"layers.{index}" for index in range(cut, num_layers)
    ]


def test_a_stack_without_the_last_norm_is_not_divided() -> None:
    for more in ({"taps": (1,)}, {"layers": range(1)}):
        with pytest.raises(ModelError, match="cannot be divided or tapped"):
            LayerStack(replace(fake_build(), **more), 2, lambda build, index: Step("", index), None)


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_a_stack_calls_its_layers_in_order(num_layers: int) -> None:
    norm = Norm(fake_build().at("norm"), 1, 1.0)
    load_layers([norm], {"norm.weight": torch.tensor([3.0])})
    plain, normalized = (
        LayerStack(
            fake_build().at("layers"),
            num_layers,
            lambda build, index: Step(build.path, index),
            last,
        )
        for last in (None, norm)
    )
    hidden = torch.ones(1, 1)
    residual = None
    for index in range(num_layers):
        hidden, residual = Step("", index)(hidden, residual, 0.5)
    assert torch.equal(plain(torch.ones(1, 1), 0.5), hidden + residual)
    assert torch.equal(normalized(torch.ones(1, 1), 0.5), norm(hidden + residual))
    assert [layer.path for layer in plain.layers] == [
        f"layers.{index}" for index in range(num_layers)
    ]
