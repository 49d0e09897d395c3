"""Experts: routing and the order of rows against brute force, and the layer against one token at a
time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pegboard import ops
from pegboard.errors import ModelError
from pegboard.layers import Experts, RouterRule
from pegboard.layers.build import LoRALimits
from pegboard.layers.shards import Group
from pegboard_testing.fake_build import adapter_rows, fake_build, load_layers
from pegboard_testing.fake_collective import on_ranks
from pegboard_testing.fake_gpu import DEVICE, FakeGPU

E = 6
HIDDEN = 8
WIDTH = 4


def by_hand(
    logits: list[float], rule: RouterRule, correction: list[float] | None
) -> dict[int, float]:
    """The chosen experts of one token and their weights, in plain Python."""
    exps = torch.tensor(logits, dtype=torch.float64).exp()
    scores = (exps / exps.sum() if rule.score == "softmax" else exps / (1 + exps)).tolist()
    choice = [s + (0 if correction is None else correction[e]) for e, s in enumerate(scores)]
    size = len(logits) // rule.num_groups
    worth = {
        g: sum(sorted(choice[g * size : (g + 1) * size], reverse=True)[: rule.group_best])
        for g in range(rule.num_groups)
    }
    open_groups = sorted(worth, key=lambda g: worth[g], reverse=True)[: rule.top_groups]
    allowed = [e for e in range(len(logits)) if e // size in open_groups]
    chosen = sorted(allowed, key=lambda e: choice[e], reverse=True)[: rule.top_k]
    total = sum(scores[e] for e in chosen) if rule.renormalize else 1.0
    return {e: scores[e] / total * rule.scale for e in chosen}


@st.composite
def routings(draw: Any) -> tuple[Tensor, RouterRule, Tensor | None]:
    num_groups = draw(st.sampled_from([1, 2, 4]))
    size = draw(st.integers(2, 5))
    top_groups = draw(st.integers(1, num_groups))
    rule = RouterRule(
        draw(st.integers(1, top_groups * size)),
        draw(st.sampled_from(["softmax", "sigmoid"])),
        draw(st.booleans()),
        draw(st.sampled_from([1.0, 2.5])),
        num_groups,
        top_groups,
        draw(st.integers(1, 2)),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    correction = (
        torch.randn(num_groups * size, generator=generator) if draw(st.booleans()) else None
    )
    return (
        torch.randn(draw(st.integers(0, 5)), num_groups * size, generator=generator) * 2,
        rule,
        correction,
    )


@settings(deadline=None, max_examples=40)
@given(routings())
def test_routing_is_that_of_brute_force(case: tuple[Tensor, RouterRule, Tensor | None]) -> None:
    logits, rule, correction = case
    weights, ids = ops.route(logits, rule, correction)
    assert (
        weights.dtype == torch.float32
        and ids.dtype == torch.int32
        and ids.shape == (len(logits), rule.top_k)
    )
    for row, token in enumerate(logits.tolist()):
        expected = by_hand(token, rule, None if correction is None else correction.tolist())
        found = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 9), st.integers(1, 4), st.booleans(), st.integers(0, 99))
def test_rows_are_sorted_and_added_up_again(
    tokens: int, top_k: int, has_factors: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 3, generator=generator)
    ids = torch.rand(tokens, E, generator=generator).argsort(1)[:, :top_k].int()
    weights = torch.rand(tokens, top_k, generator=generator)
    rows, places, starts = ops.sort_by_expert(x, ids, E, weights if has_factors else None)
    owner = torch.repeat_interleave(torch.arange(E), starts.diff())
    assert starts[0] == 0 and starts[-1] == len(rows) == tokens * top_k
    for token in range(tokens):
        for choice in range(top_k):
            assert owner[places[token, choice]] == ids[token, choice]
            factor = weights[token, choice] if has_factors else 1.0
            torch.testing.assert_close(rows[places[token, choice]], x[token] * factor)
    shared = torch.randn(tokens, 3, generator=generator)
    gate = torch.randn(tokens, 1, generator=generator)
    total = weights.sum(1, keepdim=True)
    if not has_factors:
        torch.testing.assert_close(ops.sum_experts(rows, places, weights), x * total)
        torch.testing.assert_close(ops.sum_experts(rows, places, None, shared), x * top_k + shared)
    else:
        torch.testing.assert_close(
            ops.sum_experts(rows, places, None, shared, gate), x * total + shared * gate.sigmoid()
        )


def weights_of(experts: int = E) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {
        "gate": (experts, WIDTH, HIDDEN),
        "up": (experts, WIDTH, HIDDEN),
        "down": (experts, HIDDEN, WIDTH),
    }
    shapes |= {
        "gate_bias": (experts, WIDTH),
        "up_bias": (experts, WIDTH),
        "down_bias": (experts, HIDDEN),
    }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def expected_of(
    held: dict[str, Tensor],
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    *,
    bias: bool,
    clamped: bool,
    on_input: bool,
):  # type: ignore[no-untyped-def]
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token].long(), strict=True):
            given_x = x[token] * weight if on_input else x[token]
            gate = held["gate"][expert] @ given_x
            up = held["up"][expert] @ given_x
            if bias:
                gate = gate + held["gate_bias"][expert]
                up = up + held["up_bias"][expert]
            if clamped:
                gate = gate.clamp(max=2.0)
                up = up.clamp(-2.0, 2.0)
                inner = gate * (1.5 * gate).sigmoid() * (up + 1)
            else:
                inner = gate * gate.sigmoid() * up
            y = held["down"][expert] @ inner + (held["down_bias"][expert] if bias else 0)
            out[token] += y if on_input else y * weight
    return out


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack((gate, up), 2 if gate.dim() == 3 else -1).flatten(1, 2)


class Clamped:
    """An activation that a model brings."""

    def bind(self, kernels: object, is_interleaved: bool) -> Any:
        def forward(x: Tensor) -> Tensor:
            gate, up = (x[:, ::2], x[:, 1::2]) if is_interleaved else x.chunk(2, -1)
            gate = gate.clamp(max=2.0)
            return gate * (1.5 * gate).sigmoid() * (up.clamp(-2.0, 2.0) + 1)

        return forward


LAYOUTS = ["modules", "stacked", "merged", "gpt_oss"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("on_input", [False, True])
def test_the_layer_computes_what_each_expert_computes(layout: str, on_input: bool) -> None:
    held = weights_of()
    is_oss = layout == "gpt_oss"
    tensors: dict[str, Tensor] = {}
    if layout == "modules":
        for e in range(E):
            tensors |= {
                f"e.{e}.{name}_proj.weight": held[name][e] for name in ("gate", "up", "down")
            }
    elif layout == "stacked":
        tensors = {f"e.{name}_proj.weight": held[name] for name in ("gate", "up", "down")}
    elif layout == "merged":
        tensors = {
            "e.gate_up_proj": torch.cat((held["gate"], held["up"]), 1),
            "e.down_proj": held["down"],
        }
    else:
        tensors = {
            "e.gate_up_proj": interleaved(held["gate"], held["up"]).transpose(1, 2).contiguous(),
            "e.gate_up_proj_bias": interleaved(held["gate_bias"], held["up_bias"]),
            "e.down_proj": held["down"].transpose(1, 2).contiguous(),
            "e.down_proj_bias": held["down_bias"],
        }
    more: dict[str, Any] = (
        {"bias": True, "activation": Clamped(), "is_transposed": True, "is_interleaved": True}
        if is_oss
        else {}
    )
    rule = RouterRule(2, renormalize=True)
    layer = Experts(
        fake_build(path="e"), E, HIDDEN, WIDTH, rule=rule, weighs_input=on_input, **more
    )
    assert load_layers([layer], tensors) == set(tensors)
    x = torch.randn(7, HIDDEN)
    logits = torch.randn(7, E)
    weights, ids = ops.route(logits, rule)
    expected = expected_of(held, x, weights, ids, bias=is_oss, clamped=is_oss, on_input=on_input)
    torch.testing.assert_close(layer(x, logits), expected, atol=1e-4, rtol=1e-4)
    shared = torch.randn(7, HIDDEN)
    gate = torch.randn(7, 1)
    torch.testing.assert_close(
        layer(x, logits, shared, gate), expected + shared * gate.sigmoid(), atol=1e-4, rtol=1e-4
    )


def test_routing_of_deepseek_v3_in_the_layer() -> None:
    """Sigmoid scores, a correction that only affects the choice, and two of four groups
    (DeepSeek-AI 2024)."""
    rule = RouterRule(
        3, "sigmoid", renormalize=True, scale=2.5, num_groups=4, top_groups=2, group_best=2
    )
    held = weights_of(8)
    correction = torch.linspace(1.0, -1.0, 8)
    tensors = {f"e.{name}_proj.weight": held[name] for name in ("gate", "up", "down")} | {
        "gate.e_score_correction_bias": correction
    }
    layer = Experts(
        fake_build(path="e"), 8, HIDDEN, WIDTH, rule=rule, correction="gate.e_score_correction_bias"
    )
    assert load_layers([layer], tensors) == set(tensors)
    x = torch.randn(5, HIDDEN)
    logits = torch.randn(5, 8)
    chosen = [by_hand(row, rule, correction.tolist()) for row in logits.tolist()]
    ids = torch.tensor([list(choice) for choice in chosen])
    weights = torch.tensor([list(choice.values()) for choice in chosen], dtype=torch.float32)
    expected = expected_of(held, x, weights, ids, bias=False, clamped=False, on_input=False)
    torch.testing.assert_close(layer(x, logits), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("layout", ["modules", "merged"])
def test_an_adapter_of_all_experts_is_that_of_each(layout: str, size: int) -> None:
    """PEFT's layout: the delta of expert e is B.view(out, rank, E)[:, :, e] @ A.view(E, rank,
    in)[e]. Ranks share out the experts."""
    held = weights_of()
    generator = torch.Generator().manual_seed(2)
    rank = 3
    pairs = {
        name: (
            torch.randn(E * rank, columns, generator=generator),
            torch.randn(rows, E * rank, generator=generator),
        )
        for name, rows, columns in (("e.base_layer", 2 * WIDTH, HIDDEN), ("e", HIDDEN, WIDTH))
    }
    first, down = (
        torch.einsum("ore,eri->eoi", b.view(len(b), rank, E), a.view(E, rank, -1)) * 0.5
        for a, b in pairs.values()
    )
    changed = {
        "gate": held["gate"] + first[:, :WIDTH],
        "up": held["up"] + first[:, WIDTH:],
        "down": held["down"] + down,
    }
    if layout == "merged":
        tensors = {
            "e.gate_up_proj": torch.cat((held["gate"], held["up"]), 1),
            "e.down_proj": held["down"],
        }
    else:
        tensors = {
            f"e.{e}.{name}_proj.weight": held[name][e]
            for e in range(E)
            for name in ("gate", "up", "down")
        }
    slots = [0, 2, 1, 2, 2, 0, 1]
    rule = RouterRule(2)
    x = torch.randn(7, HIDDEN, generator=generator)
    logits = torch.randn(7, E, generator=generator)

    def compute(group: Group) -> tuple[Experts, Tensor]:
        build = fake_build(
            path="e",
            lora=LoRALimits(2, 4, "float32"),
            lora_rows=lambda: adapter_rows(slots, 2),
            tensor=replace(group, placement="round_robin"),
        )
        layer = Experts(build, E, HIDDEN, WIDTH, rule=rule)
        load_layers([layer], tensors)
        unstacked = layer.unstacked(pairs)
        assert len(unstacked) == len(layer.held) * (2 if layout == "merged" else 3)
        of_another = {"e.1.down_proj": pairs["e"]}
        assert layer.unstacked(of_another) == (of_another if 1 in layer.held else {})
        for part in layer.adapters:
            part.load(2, part.fitted(unstacked, 0.5))
        return layer, layer(x, logits)

    results = on_ranks(size, compute)
    weights, ids = ops.route(logits, rule)
    base, other = (
        expected_of(w, x, weights, ids, bias=False, clamped=False, on_input=False)
        for w in (held, changed)
    )
    uses = torch.tensor(slots).unsqueeze(1) == 2
    for _, found in results:
        torch.testing.assert_close(found, torch.where(uses, other, base), atol=1e-4, rtol=1e-4)
    assert (other - base)[1].abs().max() > 0.01
    with pytest.raises(
        ModelError,
        match=r"shapes of e do not fit 6 experts with 8 and 4 channels: A \[3, 4\], B \[8, 3\]",
    ):
        results[0][0].unstacked({"e": (torch.ones(3, 4), torch.ones(8, 3))})


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("model.layers.10.block_sparse_moe.experts", "model.layers.10.mlp.experts"),
        ("model.layers.1.block_sparse_moe", "model.layers.1.block_sparse_moe.experts"),
    ],
)
def test_an_adapter_may_name_experts_as_transformers_does(path: str, module: str) -> None:
    held = weights_of()
    build = fake_build(
        path=path, lora=LoRALimits(1, 4, "float32"), lora_rows=lambda: adapter_rows([0], 1)
    )
    layer = Experts(build, E, HIDDEN, WIDTH, rule=RouterRule(2))
    load_layers(
        [layer],
        {
            f"{path}.{e}.{name}_proj.weight": held[name][e]
            for e in range(E)
            for name in ("gate", "up", "down")
        },
    )
    pair = (torch.ones(E, HIDDEN), torch.ones(2 * WIDTH, E))
    elsewhere = "model.layers.0.mlp.experts"
    unstacked = layer.unstacked({f"{module}.base_layer": pair, elsewhere: pair})
    assert set(unstacked) == {
        f"{path}.{e}.{name}_proj" for e in range(E) for name in ("gate", "up")
    } | {elsewhere}


def test_a_stack_that_does_not_fit_is_named() -> None:
    held = weights_of()
    tensors = {f"e.{name}_proj.weight": held[name] for name in ("gate", "up", "down")}
    layer = Experts(fake_build(path="e"), E, HIDDEN + 1, WIDTH, rule=RouterRule(2))
    with pytest.raises(
        ModelError,
        match=r"e\.gate_proj\.weight has shape \[6, 4, 8\]; each of 6 experts needs \[4, 9\]",
    ):
        load_layers([layer], tensors)


@pytest.mark.parametrize(
    ("experts", "rule"), [(2, RouterRule(3)), (6, RouterRule(1, num_groups=4))]
)
def test_rules_that_do_not_fit_are_refused(experts: int, rule: RouterRule) -> None:
    with pytest.raises(ModelError, match="does not fit"):
        Experts(fake_build(path="e"), experts, HIDDEN, WIDTH, rule=rule)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ModelError, match="unknown activation 'relu'"):
        Experts(fake_build(path="e"), E, HIDDEN, WIDTH, rule=RouterRule(2), activation="relu")


def test_order_and_adapters_of_rows_wait_for_no_device() -> None:
    rows = adapter_rows([0, 2, 1, 2, 0], 2)
    rows = rows._replace(order=torch.cat((rows.order, torch.tensor([77, -3], dtype=torch.int32))))
    ids = torch.tensor([[0, 5], [1, 0], [5, 6], [4, 3], [2, 6]], dtype=torch.int32)
    held = torch.tensor([[0, 1, -1, 2, 3, -1, -1], [3, -1, 2, 1, 0, -1, -1]], dtype=torch.int32)
    counts = torch.zeros(7, dtype=torch.int32)
    x = torch.randn(5, 3)
    expected = ops.sort_by_expert(x, ids, 4, None, held, counts)
    expected_rows = ops.expert_adapter_rows(rows, *expected[1:])
    assert counts.tolist() == [2, 1, 1, 1, 1, 2, 2]
    with FakeGPU() as gpu:
        given = [tensor.to(DEVICE) for tensor in (x, ids, held, torch.zeros_like(counts))]
        found = ops.sort_by_expert(given[0], given[1], 4, None, *given[2:])
        rows = ops.AdapterRows(*(part.to(DEVICE) for part in rows))
        found_rows = ops.expert_adapter_rows(rows, *found[1:])
        total = ops.sum_experts(*found[:2], None)
        assert gpu.host_reads == 0
        for ours, theirs in zip(
            (*found, *found_rows, given[3]), (*expected, *expected_rows, counts), strict=True
        ):
            assert torch.equal(ours.cpu(), theirs)
        torch.testing.assert_close(total.cpu(), ops.sum_experts(*expected[:2], None))
