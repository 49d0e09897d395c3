"""Experts: routing, order and sums as the references compute them, products of all weight formats,
and recordings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_kernel_cpu import elementwise, experts
from pegboard_kernel_cpu.block_weight import NativeBlockWeight
from pegboard_kernel_cpu.code_weight import NativeCodeWeight
from pegboard_kernel_cpu.experts import NativeExperts
from pegboard_kernel_cpu.float_weight import NativeFloatWeight
from pegboard_kernel_cpu.library import library
from pegboard_kernel_cpu.replay import NativeReplay

from pegboard import ops
from pegboard.errors import CannotRecord
from pegboard.ops.blocks import Blocks
from pegboard.ops.experts import RouterRule
from pegboard.ops.float_codes import E2M1, FloatCodes, float8_values
from pegboard_models.clamped_swiglu import clamped_swiglu
from pegboard_models.sparse_mixer import SparseMixer, sparse_mixer
from pegboard_models.zero_experts import zero_experts

pytestmark = pytest.mark.usefixtures("native")

E = 5
COLUMNS = 64


def blocks_of(rows: int, bits: int = 4, seed: int = 0, order: bool = False) -> Blocks:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << bits, (rows, COLUMNS), generator=generator, dtype=torch.uint8)
    scale = torch.rand(rows, COLUMNS // 32, generator=generator).half() / 8
    columns = torch.randperm(COLUMNS, generator=generator) if order else None
    return Blocks(bits, 32, codes, scale, zero=1 << (bits - 1), order=columns)


def codes_of(rows: int, factor: float, seed: int = 0) -> FloatCodes:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, COLUMNS), generator=generator, dtype=torch.uint8)
    scale = torch.rand(rows, COLUMNS // 16, generator=generator).to(torch.float8_e4m3fn)
    return FloatCodes(codes, E2M1, scale, (1, 16), factor)


def weight_of(kind: str, rows: int) -> Any:
    """A weight of E experts with `rows` rows each."""
    shape = (E * rows, COLUMNS)
    if kind == "float":
        weight: Any = NativeFloatWeight(shape, torch.float32, "cpu")
        weight.plain().copy_(torch.randn(shape, generator=torch.Generator().manual_seed(3)) / 8)
    elif kind == "nvfp4":  # every part has a factor
        weight = NativeCodeWeight(shape, torch.float32, "cpu")
        for part in range(2 * E):
            weight.write(part * rows // 2, codes_of(rows // 2, 1.0 + part, part))
    elif kind == "fp8":
        weight = NativeCodeWeight(shape, torch.float32, "cpu")
        codes = torch.randint(
            0, 120, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(4)
        )
        weight.write(
            0,
            FloatCodes(
                codes,
                float8_values(torch.float8_e4m3fn),
                torch.rand(shape[0], 1) / 99,
                (1, COLUMNS),
            ),
        )
    elif kind == "two levels":  # Q4_K of GGUF
        weight = NativeBlockWeight(shape, torch.float32, "cpu")
        scale = torch.randint(0, 64, (shape[0], COLUMNS // 32), dtype=torch.int8)
        codes = torch.randint(0, 16, shape, dtype=torch.uint8)
        weight.write(
            0,
            Blocks(
                4, 32, codes, scale, scale.flip(0), outer=torch.rand(2, shape[0], 1).half() / 400
            ),
        )
    else:
        weight = NativeBlockWeight(shape, torch.float32, "cpu")
        if kind == "blocks":
            weight.write(0, blocks_of(E * rows))
        for expert in range(E) if kind != "blocks" else ():
            bits = 5 if kind == "other bits" and expert == 2 else 4
            weight.write(
                expert * rows,
                blocks_of(
                    rows // 2, 8 if kind == "two formats" else bits, expert, kind == "orders"
                ),
            )
            weight.write(
                expert * rows + rows // 2, blocks_of(rows // 2, bits, 50 + expert, kind == "orders")
            )
    weight.finish()
    return weight


TOGETHER = ["float", "blocks", "two formats", "two levels", "nvfp4", "fp8"]


@pytest.mark.parametrize("counts", [(0, 1, 0, 0, 0), (3, 0, 1, 40, 2), (0, 0, 200, 0, 17)], ids=str)
@pytest.mark.parametrize("kind", [*TOGETHER, "other bits", "orders"])
def test_each_expert_multiplies_its_rows(kind: str, counts: tuple[int, ...]) -> None:
    rows = 48 if kind in ("float", "blocks", "fp8", "two levels") else 32
    weight = weight_of(kind, rows)
    bias = torch.randn(E, rows)
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    x = torch.randn(int(starts[-1]), COLUMNS)
    dense = weight.dense().view(E, rows, COLUMNS)
    for given_bias in (bias, None):
        call = weight.bind_experts(E, given_bias)
        assert isinstance(call, NativeExperts) == (kind in TOGETHER)
        owners = torch.repeat_interleave(torch.arange(E), torch.tensor(counts))
        expected = torch.einsum("nc,nrc->nr", x, dense[owners]) + (
            0 if given_bias is None else given_bias[owners]
        )
        rounding = float(
            x.abs().max() / 127 * dense.norm(dim=-1).max()
        )  # activations become bytes; twice that is seven deviations
        is_exact = kind == "float" or max(counts) < library().constant("codes_rounded_from")
        allowed = 1e-3 if is_exact and not isinstance(weight, NativeBlockWeight) else 2 * rounding
        torch.testing.assert_close(call(x, starts), expected, atol=allowed, rtol=1e-4)


@pytest.mark.parametrize("kind", TOGETHER)
def test_experts_can_change_places(kind: str) -> None:
    rows = 48 if kind in ("float", "blocks", "fp8", "two levels") else 32
    weight = weight_of(kind, rows)
    before = weight.dense().clone().view(E, rows, COLUMNS)
    memory = weight.expert_memory(E).experts
    for one, other in zip(memory[1], memory[3], strict=True):
        kept = one.clone()
        one.copy_(other)
        other.copy_(kept)
    after = weight.dense().view(E, rows, COLUMNS)
    assert torch.equal(after, before[[0, 3, 2, 1, 4]])
    assert weight.expert_memory(E).form == weight_of(kind, rows).expert_memory(E).form


def test_experts_in_different_forms_stay() -> None:
    assert weight_of("other bits", 32).expert_memory(E) is None
    assert weight_of("orders", 32).expert_memory(E) is None
    odd = NativeBlockWeight((2 * 9, COLUMNS), torch.float32, "cpu")
    odd.write(0, blocks_of(18))
    odd.finish()
    assert odd.expert_memory(2) is None
    forms = {str(weight_of(kind, 32).expert_memory(E).form) for kind in TOGETHER}
    assert len(forms) == len(TOGETHER)


@pytest.mark.parametrize("rows", [9, 32])
def test_floats_change_places_before_and_after_they_are_bound(rows: int) -> None:
    weight = weight_of("float", rows)
    x = torch.randn(3, COLUMNS)
    starts = torch.tensor([0, 1, 1, 3, 3, 3], dtype=torch.int32)
    first = weight.expert_memory(E).experts
    call = weight.bind_experts(E, None)
    expected = call(x[[1, 2]], torch.tensor([0, 0, 0, 2, 2, 2], dtype=torch.int32))
    first[1][0].copy_(first[2][0])
    found = call(x[[1, 2]], torch.tensor([0, 0, 2, 2, 2, 2], dtype=torch.int32))
    torch.testing.assert_close(found, expected)
    assert first[1][0].data_ptr() == weight.expert_memory(E).experts[1][0].data_ptr()
    assert call(x, starts).shape == (3, rows)


def test_matrices_of_odd_sizes_are_computed_too() -> None:
    weight = NativeBlockWeight((2 * 9, COLUMNS), torch.float32, "cpu")
    weight.write(0, blocks_of(18))
    weight.finish()
    x = torch.randn(3, COLUMNS)
    dense = weight.dense().view(2, 9, COLUMNS)
    found = weight.bind_experts(2, None)(x, torch.tensor([0, 1, 3]))
    torch.testing.assert_close(
        found, torch.cat((x[:1] @ dense[0].T, x[1:] @ dense[1].T)), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("kind", [NativeFloatWeight, NativeBlockWeight])
@pytest.mark.parametrize("rows", [9, 16])
def test_what_is_bound_sees_new_values(kind: Any, rows: int) -> None:
    weight = kind((2 * rows, COLUMNS), torch.float32, "cpu")
    x = torch.randn(3, COLUMNS)

    def fill() -> torch.Tensor:
        if kind is NativeFloatWeight:
            weight.plain().normal_()
        else:
            weight.write(0, blocks_of(2 * rows, seed=int(torch.randint(1000, ()))))
        weight.finish()
        dense: torch.Tensor = weight.dense().view(2, rows, COLUMNS)
        return torch.cat((x[:1] @ dense[0].T, x[1:] @ dense[1].T))

    fill()
    call = weight.bind_experts(2, None)
    for _ in range(3):
        expected = fill()
        found = call(x, torch.tensor([0, 1, 3], dtype=torch.int32))
        error = 1e-4 if kind is NativeFloatWeight or rows == 9 else 0.1 * expected.abs().max()
        torch.testing.assert_close(found, expected, atol=float(error), rtol=1e-4)


RULES = [
    RouterRule(2),
    RouterRule(3, "sigmoid", renormalize=True, scale=2.5),
    RouterRule(4, "sigmoid", renormalize=True, num_groups=4, top_groups=2, group_best=2),
    RouterRule(8, num_groups=2, top_groups=1, scale=16.0),
    SparseMixer(2, jitter=0.2, scale=1.5),
]


@settings(deadline=None, max_examples=8)
@given(st.sampled_from(RULES), st.booleans(), st.integers(1, 40), st.integers(0, 99))
def test_routing_and_order_are_those_of_the_references(
    rule: RouterRule, corrected: bool, tokens: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, 16, generator=generator) * 2
    x = torch.randn(tokens, 24, generator=generator)
    correction = torch.randn(16, generator=generator) if corrected else None
    reference = sparse_mixer if rule.op == "sparse_mixer" else ops.route
    weights, ids = getattr(experts, rule.op)(logits, rule, correction)
    expected, expected_ids = reference(logits, rule, correction)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)
    some = torch.full((16,), -1, dtype=torch.int32)
    some[torch.randperm(16, generator=generator)[:5]] = torch.arange(5, dtype=torch.int32)
    for factors, held in ((None, some), (weights, some), (None, None), (weights, None)):
        count = 16 if held is None else 5
        found = experts.sort_by_expert(x, ids, count, factors, held)
        wanted = ops.sort_by_expert(x, ids, count, factors, held)
        assert torch.equal(found[1], wanted[1]) and torch.equal(found[2], wanted[2])
        end = int(found[2][-1])
        torch.testing.assert_close(found[0][:end], wanted[0][:end])
        if held is not None:
            torch.testing.assert_close(
                experts.sum_experts(found[0], found[1], weights),
                ops.sum_experts(wanted[0][:end], wanted[1], weights),
            )
    turns = torch.stack([some[torch.randperm(16, generator=generator)] for _ in range(3)])
    counts = [torch.full((16,), 5, dtype=torch.int32) for _ in range(2)]
    turned = experts.sort_by_expert(x, ids, 5, None, turns, counts[0])
    wanted = ops.sort_by_expert(x, ids, 5, None, turns, counts[1])
    assert torch.equal(turned[1], wanted[1]) and torch.equal(turned[2], wanted[2])
    assert torch.equal(*counts) and int(counts[0].sum()) == 16 * 5 + ids.numel()
    rows, places, _ = found
    shared = torch.randn(tokens, 24, generator=generator)
    gate = torch.randn(tokens, 1, generator=generator)
    for more in ((None,), (weights, shared), (weights, shared, gate)):
        torch.testing.assert_close(
            experts.sum_experts(rows, places, *more), ops.sum_experts(rows, places, *more)
        )


@settings(deadline=None, max_examples=8)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 40), st.integers(0, 99))
def test_zero_experts_are_separated(num_real: int, num_zero: int, tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, num_real + num_zero, generator=generator)
    weights, ids = scores.topk(min(4, scores.shape[1]))
    found = experts.zero_experts(weights, ids.int(), num_real)
    for one, other in zip(found, zero_experts(weights, ids.int(), num_real), strict=True):
        torch.testing.assert_close(one, other)
    assert (found[1] < num_real).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_clamped_activation(interleaved: bool) -> None:
    x = torch.randn(7, 2 * 45) * 6
    found = experts.clamped_swiglu(x, 1.702, 7.0, interleaved)
    torch.testing.assert_close(
        found, clamped_swiglu(x, 1.702, 7.0, interleaved), atol=1e-5, rtol=1e-5
    )


def feed_forward(kind: str) -> Any:
    """A block of experts [T, 64] → [T, 64], as the layer composes it."""
    norm = torch.rand(COLUMNS)
    up = weight_of(kind, 128).bind_experts(E, None)
    down = weight_of(kind, 64).bind_experts(E, None)
    router = NativeFloatWeight((E, COLUMNS), torch.float32, "cpu")
    router.plain().copy_(torch.randn(E, COLUMNS, generator=torch.Generator().manual_seed(9)))
    router.finish()
    choose = router.bind()

    def run(hidden: Any) -> Any:
        x = elementwise.rms_norm(hidden, norm, 1e-5)
        weights, ids = experts.route(choose(x), RouterRule(2, renormalize=True))
        rows, places, starts = experts.sort_by_expert(x, ids, E)
        return experts.sum_experts(
            down(elementwise.silu_mul(up(rows, starts)), starts), places, weights, x
        )

    return run


@pytest.mark.parametrize("kind", TOGETHER)
def test_recorded_experts_compute_the_same(kind: str) -> None:
    run = feed_forward(kind)
    hidden = torch.randn(40, COLUMNS)
    program = NativeReplay().record(lambda x: (run(run(x)),), [hidden])
    for tokens in (1, 3, 40, 17, 1):
        hidden.copy_(torch.randn(40, COLUMNS))
        torch.testing.assert_close(
            program(tokens)[0], run(run(hidden[:tokens])), atol=1e-4, rtol=1e-4
        )


def test_experts_that_are_computed_one_by_one_are_not_recorded() -> None:
    with pytest.raises(CannotRecord, match="one_by_one.* reads values on the host"):
        NativeReplay().record(lambda x: (feed_forward("other bits")(x),), [torch.randn(4, COLUMNS)])
