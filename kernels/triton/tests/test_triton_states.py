"""Kernels of layers with states under Triton's interpreter, compared with their references: any mix
of rows, padded or not, and states that are not next to each other."""

from __future__ import annotations

from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pegboard_kernel_triton import chunks, states
from torch import Tensor

from pegboard import ops
from pegboard_models import state_ops
from pegboard_testing.contract_generic import check_entry, installed_entry

pytestmark = [
    pytest.mark.usefixtures("interpreted_triton"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # where sigmoid is 0
]
SOME = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
OPS = ("causal_conv", "selective_scan", "chunked_scan", "gated_delta_rule", "gated_norm")
BLOCKS = 7

lengths_of_rows = st.lists(st.sampled_from([1, 1, 2, 19]), min_size=1, max_size=4)
more_rows_and_tokens = st.sampled_from([(0, 0), (2, 0), (0, 3), (3, 2)])
dtypes = st.sampled_from(list(TOLERANCES))


class Step:
    """Rows of these lengths, every second one new, and the memory of their states. padding: further
    rows without tokens, and further tokens."""

    def __init__(
        self,
        lengths: list[int],
        padding: tuple[int, int],
        dtype: torch.dtype,
        *shape: int,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.generator = torch.Generator().manual_seed(len(lengths) + sum(lengths))
        self.dtype = dtype
        count = len(lengths)
        rest = [0] * padding[0]
        self.num_tokens = sum(lengths)
        self.count = self.num_tokens + padding[1]
        self.memory = torch.randn(
            BLOCKS, torch.Size(shape).numel() + 5, generator=self.generator
        ).to(state_dtype)
        self.state = self.memory[:, 3:-2].view(BLOCKS, *shape)
        order = (torch.randperm(BLOCKS - 1, generator=self.generator) + 1)[:count].tolist()
        starts = torch.tensor([0, *lengths, *rest]).cumsum(0).int()
        seq_lens = [length + row % 2 * 5 for row, length in enumerate(lengths)]
        table = torch.tensor([[block, 0] for block in [*order, *rest]], dtype=torch.int32)
        all_lens = torch.tensor([*seq_lens, *rest], dtype=torch.int32)
        self.rows = ops.StateRows(table, all_lens, starts, None)
        self.real = ops.StateRows(
            table[:count], all_lens[:count], starts[: count + 1], starts[: count + 1].tolist()
        )

    def random(self, *shape: int) -> Tensor:
        """Numbers of each token, not next to those of the other tokens."""
        flat = torch.randn(self.count, torch.Size(shape).numel() + 3, generator=self.generator).to(
            self.dtype
        )
        return flat[:, 2:-1].view(self.count, *shape)

    def weight(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def compare(
        self, name: str, *inputs: Any, after: tuple[Any, ...] = (), module: ModuleType = states
    ) -> None:
        """The op's result and the states after it are those of the reference in float32, no other
        memory changes, and what pads the step becomes finite."""
        before = self.memory.clone()
        found = getattr(module, name)(*inputs, self.state, self.rows, *after)
        states_after = self.memory.clone()
        self.memory.copy_(before)
        wide = [self._wide(each) for each in inputs]
        state = self.memory.float()[:, 3:-2].view(self.state.shape)
        expected = getattr(state_ops, name)(*wide, state, self.real, *after)
        allowed = TOLERANCES[self.dtype] * (float(expected.abs().max()) + 1)
        real = found[: self.num_tokens].float()
        torch.testing.assert_close(real, expected, atol=allowed, rtol=TOLERANCES[self.dtype])
        assert found.dtype == self.dtype and not found[self.num_tokens :].any()
        self.memory[:, 3:-2] = state.flatten(1).to(self.memory.dtype)
        size = float(self.memory.abs().max()) + 1
        torch.testing.assert_close(states_after, self.memory, atol=2e-5 * size, rtol=1e-4)

    def _wide(self, value: Any) -> Any:
        """What tokens have is not contiguous, in contrast to weights."""
        if not isinstance(value, Tensor):
            return value
        return value.float() if value.is_contiguous() else value[: self.num_tokens].float()


@pytest.mark.parametrize("name", OPS)
def test_contract(name: str) -> None:
    check_entry(installed_entry("kernel", f"{name}.triton"))


@SOME
@given(
    lengths_of_rows,
    more_rows_and_tokens,
    st.sampled_from([1, 6, 150]),
    st.sampled_from([2, 3, 4, 5]),
    st.booleans(),
    st.booleans(),
    dtypes,
)
def test_convolution(
    lengths: list[int],
    padding: tuple[int, int],
    channels: int,
    width: int,
    has_bias: bool,
    activates: bool,
    dtype: torch.dtype,
) -> None:
    step = Step(lengths, padding, dtype, channels, width - 1, state_dtype=dtype)
    weight = step.weight(channels, width).to(dtype)
    bias = step.weight(channels).to(dtype) if has_bias else None
    step.compare("causal_conv", step.random(channels), weight, bias, after=(activates,))


@SOME
@given(
    lengths_of_rows,
    more_rows_and_tokens,
    st.sampled_from([1, 5, 70]),
    st.sampled_from([1, 5, 16]),
    dtypes,
)
def test_selective_scan(
    lengths: list[int], padding: tuple[int, int], channels: int, size: int, dtype: torch.dtype
) -> None:
    step = Step(lengths, padding, dtype, channels, size)
    x, steps, b, c = (step.random(width) for width in (channels, channels, size, size))
    a_log = step.weight(channels, size)
    step.compare("selective_scan", x, steps * 3, a_log, b, c, step.weight(channels))


@SOME
@given(
    lengths_of_rows,
    more_rows_and_tokens,
    st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    st.sampled_from([1, 8, 19]),
    st.sampled_from([1, 16, 130]),
    st.booleans(),
    dtypes,
)
@pytest.mark.parametrize("module", [states, chunks])
def test_chunked_scan(
    module: ModuleType,
    lengths: list[int],
    padding: tuple[int, int],
    heads: tuple[int, int],
    head_dim: int,
    size: int,
    has_limits: bool,
    dtype: torch.dtype,
) -> None:
    num_heads, groups = heads
    limits = (0.1, 0.8) if has_limits else (0.0, float("inf"))
    step = Step(lengths, padding, dtype, num_heads, head_dim, size)
    bias, a_log, skip = (step.weight(num_heads) for _ in range(3))
    x = step.random(num_heads, head_dim)
    steps = step.random(num_heads)
    b, c = (step.random(groups, size) for _ in range(2))
    with mock.patch.object(chunks, "TOKENS", 16):  # so that rows have several chunks
        step.compare("chunked_scan", x, steps, bias, limits, a_log, b, c, skip, module=module)


@pytest.mark.sampled(2)
@SOME
@given(
    lengths_of_rows,
    more_rows_and_tokens,
    st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    st.sampled_from([1, 8, 19]),
    st.sampled_from([5, 16, 130]),
    st.booleans(),
    dtypes,
)
@pytest.mark.parametrize("module", [states, chunks])
def test_gated_delta_rule(
    module: ModuleType,
    lengths: list[int],
    padding: tuple[int, int],
    heads: tuple[int, int],
    head_dim: int,
    size: int,
    per_channel: bool,
    dtype: torch.dtype,
) -> None:
    num_heads, groups = heads
    step = Step(lengths, padding, dtype, num_heads, head_dim, size)
    decays = (size,) if per_channel else ()
    q, k = (step.random(groups, size) for _ in range(2))
    v = step.random(num_heads, head_dim)
    steps = step.random(num_heads, *decays)
    bias = step.weight(num_heads, *decays)
    a_log = step.weight(num_heads)
    beta = step.random(num_heads)
    step.compare("gated_delta_rule", q, k, v, steps, bias, a_log, beta, module=module)


@SOME
@given(
    st.integers(0, 4),
    st.integers(1, 3),
    st.sampled_from([1, 8, 19, 1030]),
    st.sampled_from(["all", "shared", ""]),
    st.booleans(),
    dtypes,
)
def test_gated_norm(
    tokens: int, parts: int, size: int, kind: str, gates_first: bool, dtype: torch.dtype
) -> None:
    step = Step([1], (0, tokens), dtype, 1)
    x, gate = (step.random(parts * size)[1:] for _ in range(2))
    gate = gate * 20
    weight = None
    if kind:
        weight = step.weight(size if kind == "shared" else parts * size).to(dtype)
    found = states.gated_norm(x, gate, weight, 1e-5, size, gates_first)
    expected = state_ops.gated_norm(x, gate, weight, 1e-5, size, gates_first)
    torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


def test_the_logarithm_is_exact_for_small_steps() -> None:
    """A channel that adds little in each step keeps it over many."""
    step = Step([1], (0, 0), torch.float32, 4, 2)
    x = torch.ones(1, 4)
    steps = torch.tensor([[-15.0, -6.0, 0.0, 30.0]])
    ones = torch.ones(1, 2)
    a_log = torch.full((4, 2), -40.0)
    states.selective_scan(x, steps, a_log, ones, ones, torch.zeros(4), step.state, step.rows)
    expected = torch.nn.functional.softplus(steps.double())[0].float()
    block = int(step.rows.blocks[0])
    torch.testing.assert_close(step.state[block, :, 0], expected, atol=0, rtol=1e-6)
