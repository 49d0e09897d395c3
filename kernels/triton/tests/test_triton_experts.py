"""Products of experts under Triton's interpreter: the tiles of rows, and float weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pegboard_kernel_triton import experts
from pegboard_kernel_triton.experts import multiply_experts, num_tiles, tile_of
from pegboard_kernel_triton.float_weight import TritonFloatWeight

from pegboard.ops.experts import one_by_one
from pegboard_testing.contract_float_weight import FloatWeightContract
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.fake_gpu import DEVICE, FakeGPU
from pegboard_testing.fake_triton import triton_on_fake_gpu

pytestmark = pytest.mark.usefixtures("interpreted_triton")
SOME = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TOLERANCES = {torch.float32: 2e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the starts of few experts fill a vector."""
    monkeypatch.setattr(experts, "GROUPS", tl.constexpr(4))


def test_contract() -> None:
    check_entry(installed_entry("kernel", "float_weight.triton"))


class TestTritonFloatWeight(FloatWeightContract):
    weight_class = TritonFloatWeight


@triton.jit
def _all_tiles(starts, out, E, BLOCK_M: tl.constexpr):
    pid = tl.program_id(0)
    expert, first, stop = tile_of(starts, pid, E, BLOCK_M)
    tl.store(out + 3 * pid, expert)
    tl.store(out + 3 * pid + 1, first)
    tl.store(out + 3 * pid + 2, stop)


@SOME
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=9),
    st.integers(0, 20),
    st.integers(0, 5),
    st.sampled_from([1, 16]),
)
def test_every_row_is_in_one_tile(counts: list[int], rest: int, first: int, block: int) -> None:
    num_experts = len(counts)
    bounds = [first]
    for count in counts:
        bounds.append(bounds[-1] + count)
    num_rows = sum(counts) + rest
    programs = num_tiles(num_rows, num_experts + 1, block)
    out = torch.zeros(programs, 3, dtype=torch.int32)
    if programs:
        starts = torch.tensor(bounds, dtype=torch.int32)
        _all_tiles[(programs,)](starts, out, num_experts, BLOCK_M=block)
    owners = torch.full((first + num_rows,), -1)
    for expert, begin, stop in out.tolist():
        place = slice(begin, min(begin + block, stop))
        assert (owners[place] == -1).all()
        owners[place] = expert
    ids = torch.arange(num_experts + 1)
    expected = ids.repeat_interleave(torch.tensor([*counts, rest]))
    assert torch.equal(owners[first:], expected)


@SOME
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
    st.integers(0, 18),
    st.sampled_from([1, 5, 70, 160]),
    st.sampled_from([1, 70]),
    st.booleans(),
    st.sampled_from([(d, d) for d in TOLERANCES] + [(torch.float32, torch.bfloat16)]),
    st.integers(0, 99),
)
def test_each_expert_multiplies_its_rows(
    counts: list[int],
    rest: int,
    width: int,
    out: int,
    has_bias: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    activations, dtype = dtypes
    num_experts = len(counts)
    randn = partial(torch.randn, generator=generator)
    weight = TritonFloatWeight((num_experts * out, width), dtype, "cpu", activations=activations)
    weight.plain().copy_(randn(weight.shape) / width**0.5)
    weight.finish()
    bias = randn(num_experts, out).to(activations) if has_bias else None
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    x = randn(sum(counts) + rest, width + 3).to(activations)[:, 2:-1]
    found = weight.bind_experts(num_experts, bias)(x, starts)
    matrices = weight.dense().float().view(num_experts, out, width)
    calls = [partial(torch.nn.functional.linear, weight=matrix) for matrix in matrices]
    wide_bias = None if bias is None else bias.float()
    expected = one_by_one(calls, out, wide_bias)(x.float(), starts)
    assert found.dtype == activations
    allowed = TOLERANCES[dtype]
    torch.testing.assert_close(found.float(), expected, atol=allowed, rtol=allowed)


def test_many_rows_of_an_expert() -> None:
    x = torch.randn(70, 40)
    weights = torch.randn(2, 130, 40)
    starts = torch.tensor([0, 66, 69], dtype=torch.int32)
    found = multiply_experts(x, starts, weights)
    expected = torch.cat((x[:66] @ weights[0].T, x[66:69] @ weights[1].T, torch.zeros(1, 130)))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_other_types_are_multiplied_by_torch() -> None:
    weight = TritonFloatWeight((6, 4), torch.float64, "cpu")
    weight.plain().normal_()
    x = torch.randn(3, 4, dtype=torch.float64)
    found = weight.bind_experts(2, None)(x, torch.tensor([0, 1, 3]))
    expected = torch.cat((x[:1] @ weight.dense()[:3].T, x[1:] @ weight.dense()[3:].T))
    torch.testing.assert_close(found, expected)


def test_a_captured_product_finds_other_rows() -> None:
    from pegboard.interfaces.platform import PlatformSetup
    from pegboard_testing.fake_gpu import FakeGPUPlatform

    weights = torch.randn(3, 5, 7)
    x = torch.randn(4, 7)
    with FakeGPU() as gpu, triton_on_fake_gpu():
        given_weights, given_x = weights.to(DEVICE), x.to(DEVICE)
        starts = torch.tensor([0, 4, 4, 4], dtype=torch.int32).to(DEVICE)
        recorded = (
            FakeGPUPlatform(None, PlatformSetup())
            .replay(None)
            .record(lambda rows: (multiply_experts(rows, starts, given_weights),), [given_x])
        )
        starts.copy_(torch.tensor([0, 1, 1, 3], dtype=torch.int32))
        (found,) = recorded(4)
        assert gpu.host_reads == 0
        expected = torch.cat((x[:1] @ weights[0].T, x[1:3] @ weights[2].T, torch.zeros(1, 5)))
        torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)
