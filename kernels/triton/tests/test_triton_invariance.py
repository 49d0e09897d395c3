"""What the specs declare as batch invariant gives a token the same bits in every step, under
Triton's interpreter. Attention has this in its contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pegboard_kernel_triton import plugin
from pegboard_kernel_triton.elementwise import gelu_tanh_mul, rope, silu_mul
from pegboard_kernel_triton.float_weight import InvariantFloatWeight
from pegboard_kernel_triton.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from pegboard_kernel_triton.packed_weight import InvariantBlockWeight, InvariantCodeWeight
from pegboard_kernel_triton.sampling import sample_tokens
from pegboard_kernel_triton.states import (
    causal_conv,
    chunked_scan,
    gated_delta_rule,
    gated_norm,
    selective_scan,
)
from torch import Tensor

from pegboard.errors import ConfigError
from pegboard.interfaces.kernel import KernelSpec
from pegboard.interfaces.spec import BATCH_INVARIANT
from pegboard.ops import StateRows
from pegboard.ops.rounding import Rounding
from pegboard_testing.contract_float_weight import FloatWeightContract
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_invariance import check_experts, check_rows
from pegboard_testing.stored_rows import COLUMNS, FORMATS, blocks_of, codes_of

pytestmark = [
    pytest.mark.usefixtures("interpreted_triton"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # where sigmoid is 0
]

EXPERTS = 2
COUNTS = (3, 70)
SIZES = (72, 40)
"""Of steps: all tokens but one, and about half of them."""
ROWS = 16 * EXPERTS


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["float", "block", "code"])
def test_contract(kind: str) -> None:
    check_entry(installed_entry("kernel", f"{kind}_weight.triton_invariant"))


class TestInvariantFloatWeight(FloatWeightContract):
    weight_class = InvariantFloatWeight
    is_invariant = True
    sizes = (129,)
    every = 40

    @pytest.mark.slow
    def test_product_and_values(self) -> None:
        super().test_product_and_values()

    @pytest.mark.slow
    def test_16_bits(self) -> None:
        super().test_16_bits()


def check_weight(weight: Any) -> None:
    weight.finish()
    x = random(sum(COUNTS), COLUMNS)
    check_rows(weight.bind(), x, SIZES[:1])
    bias = random(EXPERTS, ROWS // EXPERTS)
    check_experts(weight.bind_experts(EXPERTS, bias), x, COUNTS, every=30)


@pytest.mark.parametrize("form", [FORMATS[3], FORMATS[-3]], ids=str)
def test_integers(form: tuple) -> None:
    weight = InvariantBlockWeight((ROWS, COLUMNS), torch.float32, "cpu")
    weight.write(0, blocks_of(form, ROWS, COLUMNS, 0))
    check_weight(weight)


@pytest.mark.parametrize("values", ["e4m3fn", "e2m1", "table"])
def test_codes(values: str) -> None:
    weight = InvariantCodeWeight((ROWS, COLUMNS), torch.float32, "cpu")
    weight.write(0, codes_of(values, torch.float32, (1, 64), ROWS, COLUMNS, 0))
    check_weight(weight)


def test_rounded_activations() -> None:
    """Codes are multiplied with codes."""
    weight = InvariantBlockWeight((24, 256), torch.float32, "cpu", rounding=Rounding("int8"))
    weight.write(0, blocks_of((8, 256, torch.float32, ""), 24, 256, 0))
    weight.finish()
    check_rows(weight.bind(), random(73, 256), SIZES)


def test_types_that_only_torch_multiplies_are_refused() -> None:
    with pytest.raises(ConfigError, match="batch_invariant: weights of the type torch.float64"):
        InvariantFloatWeight((8, 8), torch.float64, "cpu")


@pytest.mark.parametrize("width", [24, 70])
def test_rows_of_norms_and_activations(width: int) -> None:
    weight = random(width, seed=1)
    x = random(73, width)
    check_rows(lambda rows: rms_norm(rows, weight, 1e-5), x, SIZES)
    check_rows(lambda rows: add_rms_norm(rows, rows + 1, weight, 1e-5)[0], x, SIZES)
    check_rows(lambda rows: layer_norm(rows, weight, weight, 1e-5), x, SIZES)
    check_rows(lambda rows: add_layer_norm(rows, rows + 1, weight, None, 1e-5)[0], x, SIZES)
    check_rows(silu_mul, x, SIZES)
    check_rows(gelu_tanh_mul, x, SIZES)


def test_rotations() -> None:
    """The rotation of a token is some of its numbers."""

    def turn(x: Tensor) -> Tensor:
        heads = x[:, 8:].contiguous().view(-1, 2, 16)
        return rope(heads, x[:, :4], x[:, 4:8], False).flatten(1)

    check_rows(turn, random(73, 40), SIZES)


def test_draws() -> None:
    """The last number of a row is its random number."""

    def draw(x: Tensor) -> Tensor:
        rows = x[:, 0].new_ones(len(x))
        uniforms = x[:, -1].double().sigmoid()
        logits = x[:, :-1].contiguous()
        k = torch.full((len(x),), 9)
        return sample_tokens(logits, uniforms, rows, 0.01 * rows, k, 0.9 * rows)

    check_rows(draw, random(6, 71), (5,))


WAYS = (
    [[(0, 0, 7), (1, 0, 20)]],
    [[(0, 0, 7)], [(1, 0, 1)], [(1, 1, 20)]],
    [[(1, 0, 17)], [(1, 17, 18), (0, 0, 3)], [(0, 3, 4), (1, 18, 20)], [(0, 4, 7)]],
)
"""The steps of each way: (row, first token, token after the last one)."""


def check_states(
    call: Callable[..., Tensor], state_shape: tuple[int, ...], *shapes: tuple[int, ...]
) -> None:
    """Check that tokens and states have the same bits, however rows are cut into steps. shapes: of
    what each token has. call: (…, state, rows) → [T, …]."""
    inputs = [random(27, *shape, seed=number) for number, shape in enumerate(shapes)]
    results = []
    for steps in WAYS:
        state = torch.full((3, *state_shape), 1e9)  # new rows read none of it
        out: dict[int, Tensor] = {}
        for step in steps:
            places = [7 * row + token for row, first, stop in step for token in range(first, stop)]
            starts = torch.tensor([0, *(stop - first for _, first, stop in step)]).cumsum(0).int()
            rows = StateRows(
                torch.tensor([[row + 1] for row, _, _ in step], dtype=torch.int32),
                torch.tensor([stop for _, _, stop in step], dtype=torch.int32),
                starts,
                None,
            )
            found = call(*(each[places] for each in inputs), state, rows)
            out.update(zip(places, found, strict=True))
        results.append(torch.cat([out[place].flatten() for place in range(27)]))
        results[-1] = torch.cat([results[-1], state[1:].flatten()])
    assert all(torch.equal(each, results[0]) for each in results[1:])


def test_convolutions() -> None:
    weight = random(5, 4)
    check_states(lambda x, *rest: causal_conv(x, weight, None, *rest, True), (5, 3), (5,))


def test_selective_scans() -> None:
    a_log, skip = random(5, 4), random(5)

    def scan(x: Tensor, steps: Tensor, b: Tensor, c: Tensor, *rest: Any) -> Tensor:
        return selective_scan(x, steps, a_log, b, c, skip, *rest)

    check_states(scan, (5, 4), (5,), (5,), (4,), (4,))


def test_chunked_scans() -> None:
    bias, a_log, skip = (random(2, seed=seed) for seed in range(3))

    def scan(x: Tensor, steps: Tensor, b: Tensor, c: Tensor, *rest: Any) -> Tensor:
        return chunked_scan(x, steps, bias, (0.0, 9.0), a_log, b, c, skip, *rest)

    check_states(scan, (2, 5, 4), (2, 5), (2,), (1, 4), (1, 4))


@pytest.mark.parametrize("decays", [(), (4,)], ids=["a head", "a channel"])
def test_delta_rules(decays: tuple[int, ...]) -> None:
    bias, a_log = random(2, *decays), random(2)

    def scan(q: Tensor, k: Tensor, v: Tensor, steps: Tensor, beta: Tensor, *rest: Any) -> Tensor:
        return gated_delta_rule(q, k, v, steps, bias, a_log, beta, *rest)

    check_states(scan, (2, 5, 4), (1, 4), (1, 4), (2, 5), (2, *decays), (2,))


def test_gated_norms() -> None:
    weight = random(24)

    def norm(x: Tensor) -> Tensor:
        return gated_norm(x[:, :24], x[:, 24:], weight, 1e-5, 12, False)

    check_rows(norm, random(9, 48), (4,))


def test_what_declares_it() -> None:
    """Weights and scans have two forms each, of which one is invariant."""
    others = {
        name
        for name, spec in vars(plugin).items()
        if isinstance(spec, KernelSpec) and BATCH_INVARIANT not in spec.flags
    }
    both = {"FLOAT_WEIGHT", "BLOCK_WEIGHT", "CODE_WEIGHT", "CHUNKED_SCAN", "GATED_DELTA_RULE"}
    assert others == {*both, "LORA_ADD"}
