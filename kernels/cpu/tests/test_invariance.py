"""What the specs declare as batch invariant gives a token the same bits in every step. Attention
and float weights have this in their contracts, adapters in test_lora.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pegboard_kernel_cpu import plugin, states
from pegboard_kernel_cpu.block_weight import InvariantBlockWeight
from pegboard_kernel_cpu.code_weight import InvariantCodeWeight
from pegboard_kernel_cpu.elementwise import add_rms_norm, layer_norm, rms_norm, silu_mul
from pegboard_kernel_cpu.experts import route, sort_by_expert, sum_experts
from pegboard_kernel_cpu.float_weight import InvariantFloatWeight
from torch import Tensor

from pegboard import ops
from pegboard.errors import ConfigError
from pegboard.interfaces.kernel import KernelSpec
from pegboard.interfaces.spec import BATCH_INVARIANT
from pegboard.ops.experts import RouterRule
from pegboard_testing.contract_invariance import check_experts, check_rows
from pegboard_testing.stored_rows import COLUMNS, FORMATS, blocks_of, codes_of

pytestmark = pytest.mark.usefixtures("native")

EXPERTS = 3
COUNTS = (30, 1, 70)
ROWS = 16 * EXPERTS


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_weight(weight: Any) -> None:
    weight.finish()
    x = random(sum(COUNTS), COLUMNS)
    check_rows(weight.bind(), x)
    check_experts(weight.bind_experts(EXPERTS, random(EXPERTS, ROWS // EXPERTS)), x, COUNTS)


@pytest.mark.parametrize("form", FORMATS[::4], ids=str)
def test_integers(form: tuple) -> None:
    weight = InvariantBlockWeight((ROWS, COLUMNS), torch.float32, "cpu")
    weight.write(0, blocks_of(form, ROWS, COLUMNS, 0))
    check_weight(weight)


@pytest.mark.parametrize("values", ["e4m3fn", "e5m2", "e2m1", "table"])
@pytest.mark.parametrize("scale", [torch.float32, torch.uint8], ids=str)
def test_codes(values: str, scale: torch.dtype) -> None:
    weight = InvariantCodeWeight((ROWS, COLUMNS), torch.float32, "cpu")
    weight.write(0, codes_of(values, scale, (1, 64), ROWS, COLUMNS, 0))
    check_weight(weight)


def test_experts_that_torch_would_multiply_are_refused() -> None:
    floats = InvariantFloatWeight((3 * 20, COLUMNS), torch.float32, "cpu")
    blocks = InvariantBlockWeight((3 * 20, COLUMNS), torch.float32, "cpu")
    blocks.write(0, blocks_of(FORMATS[0], 3 * 20, COLUMNS, 0))
    for weight in (floats, blocks):
        weight.finish()
        with pytest.raises(ConfigError, match="batch_invariant: experts of .* groups of 16 rows"):
            weight.bind_experts(3, None)


@pytest.mark.parametrize("width", [24, 70, 512])
def test_rows_of_norms_and_activations(width: int) -> None:
    weight = random(width, seed=1)
    x = random(100, width)
    check_rows(lambda rows: rms_norm(rows, weight, 1e-5), x)
    check_rows(lambda rows: add_rms_norm(rows, rows + 1, weight, 1e-5)[0], x)
    check_rows(lambda rows: layer_norm(rows, weight, None, 1e-5), x)
    check_rows(silu_mul, x)
    check_rows(lambda rows: states.gated_norm(rows, rows + 1, weight, 1e-5, width, True), x)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_routing_and_sums(score: Any) -> None:
    rule = RouterRule(top_k=3, score=score, renormalize=True)

    def mix(x: Tensor) -> Tensor:
        weights, ids = route(x[:, :8].contiguous(), rule)
        rows, places, _ = sort_by_expert(x, ids, 8)
        return sum_experts(rows, places, weights)

    check_rows(mix, random(100, 40))


CHANNELS = 12
HEADS = 4
SIZE = 10


def state_op(name: str, part: slice, state: Tensor, rows: ops.StateRows) -> Tensor:
    """Compute the tokens `part` of one request."""

    def given(*shape: int, seed: int) -> Tensor:
        return random(60, *shape, seed=seed)[part].contiguous()

    op = getattr(states, name)
    if name == "causal_conv":
        weight = random(CHANNELS, 4, seed=1)
        return op(given(CHANNELS, seed=2), weight, None, state, rows, True)
    b, c = given(2, SIZE, seed=5), given(2, SIZE, seed=6)
    own = [random(HEADS, seed=seed) for seed in (7, 8, 9)]
    if name == "selective_scan":
        x, steps = given(CHANNELS, seed=2), given(CHANNELS, seed=3)
        a_log = random(CHANNELS, SIZE, seed=4)
        skip = random(CHANNELS, seed=10)
        return op(x, steps, a_log, b[:, 0], c[:, 0], skip, state, rows)
    v, steps = given(HEADS, 8, seed=2), given(HEADS, seed=3)
    if name == "chunked_scan":
        limits = (0.0, float("inf"))
        return op(v, steps, own[0], limits, own[1], b, c, own[2], state, rows)
    return op(b, c, v, steps, own[0], own[1], given(HEADS, seed=4), state, rows)


SHAPES = {
    "causal_conv": (CHANNELS, 3),
    "selective_scan": (CHANNELS, SIZE),
    "chunked_scan": (HEADS, 8, SIZE),
    "gated_delta_rule": (HEADS, 8, SIZE),
}


@pytest.mark.parametrize("name", SHAPES)
def test_states_in_chunks(name: str) -> None:
    """A prompt is computed in one step, or in several of other sizes."""
    results = []
    for sizes in ((60,), (1,) * 60, (7, 33, 1, 19)):
        state = torch.zeros(2, *SHAPES[name])
        parts = []
        done = 0
        for size in sizes:
            rows = ops.StateRows(
                torch.ones(1, 1, dtype=torch.int32),
                torch.tensor([done + size], dtype=torch.int32),
                torch.tensor([0, size], dtype=torch.int32),
                [0, size],
            )
            parts.append(state_op(name, slice(done, done + size), state, rows))
            done += size
        results.append(torch.cat([*[part.flatten(1) for part in parts]]))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_what_declares_it() -> None:
    """All but the fast products of quantized weights, whose order of sums is that of a size of
    step, and the products of other libraries."""
    others = {
        name
        for name, spec in vars(plugin).items()
        if isinstance(spec, KernelSpec) and BATCH_INVARIANT not in spec.flags
    }
    weights = {f"{kind}_WEIGHT" for kind in ("FLOAT", "BLOCK", "CODE")}
    assert others == weights | {f"{name}_ONEDNN" for name in weights}
