"""Kernels of layers with states, compared with their references: any mix of rows, and states that
are not contiguous."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_kernel_cpu import states
from pegboard_kernel_cpu.replay import NativeReplay
from torch import Tensor

from pegboard import ops
from pegboard_models import state_ops

pytestmark = pytest.mark.usefixtures("native")

SOME = settings(max_examples=12, deadline=None)
lengths_of_rows = st.lists(st.sampled_from([1, 1, 2, 7, 70]), min_size=1, max_size=5)


class Step:
    """Rows of these lengths in buffers that keep their addresses, every second one new, and the
    memory of their states."""

    def __init__(self, lengths: list[int], *shape: int, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.table = torch.zeros(9, 2, dtype=torch.int32)
        self.seq_lens = torch.zeros(9, dtype=torch.int32)
        self.starts = torch.zeros(10, dtype=torch.int32)
        self.memory = torch.randn(10, torch.Size(shape).numel() + 5, generator=self.generator)
        self.state = self.memory[:, 3:-2].view(10, *shape)
        self.fill(lengths)

    def fill(self, lengths: list[int]) -> None:
        count = len(lengths)
        first = torch.tensor([0, *lengths]).cumsum(0)
        self.table[:count, 0] = torch.randperm(9, generator=self.generator)[:count] + 1
        self.starts[: count + 1] = first
        self.seq_lens[:count] = torch.tensor(lengths) + torch.arange(count) % 2 * 5
        self.rows = ops.StateRows(self.table, self.seq_lens, self.starts, first.tolist())
        self.num_tokens = sum(lengths)

    def random(self, *shape: int) -> Tensor:
        """A tensor whose rows are not next to each other."""
        return torch.randn(shape[0], torch.Size(shape[1:]).numel() + 3, generator=self.generator)[
            :, 2:-1
        ].view(shape)

    def compare(self, name: str, *inputs: Any, after: tuple[Any, ...] = ()) -> None:
        """The op's result and the states after it are those of the reference, and no other memory
        changes."""
        before = self.memory.clone()
        expected = getattr(state_ops, name)(*inputs, self.state, self.rows, *after)
        states_after = self.memory.clone()
        self.memory.copy_(before)
        found = getattr(states, name)(*inputs, self.state, self.rows, *after)
        size = float(expected.abs().max()) + 1
        torch.testing.assert_close(found, expected, atol=2e-5 * size, rtol=1e-4)
        torch.testing.assert_close(self.memory, states_after, atol=2e-5 * size, rtol=1e-4)


@SOME
@given(
    lengths_of_rows,
    st.sampled_from([1, 6, 64, 150]),
    st.integers(2, 5),
    st.booleans(),
    st.integers(0, 99),
)
def test_convolution(
    lengths: list[int], channels: int, width: int, activates: bool, seed: int
) -> None:
    step = Step(lengths, channels, width - 1, seed=seed)
    weight = torch.randn(channels, width)
    bias = torch.randn(channels) if seed % 2 else None
    step.compare(
        "causal_conv", step.random(step.num_tokens, channels), weight, bias, after=(activates,)
    )


@SOME
@given(
    lengths_of_rows,
    st.sampled_from([1, 5, 32, 70]),
    st.sampled_from([1, 5, 8, 16, 21]),
    st.integers(0, 99),
)
def test_selective_scan(lengths: list[int], channels: int, size: int, seed: int) -> None:
    step = Step(lengths, channels, size, seed=seed)
    x, steps, *bc = (
        step.random(step.num_tokens, width) for width in (channels, channels, size, size)
    )
    step.compare(
        "selective_scan", x, steps * 9, torch.randn(channels, size), *bc, torch.randn(channels)
    )


@SOME
@given(
    lengths_of_rows,
    st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    st.sampled_from([1, 8, 19]),
    st.sampled_from([1, 5, 16, 33]),
    st.integers(0, 99),
)
def test_chunked_scan(
    lengths: list[int], heads: tuple[int, int], head_dim: int, size: int, seed: int
) -> None:
    (num_heads, groups) = heads
    limits = (0.1, 0.8) if seed % 2 else (0.0, float("inf"))
    step = Step(lengths, num_heads, head_dim, size, seed=seed)
    count = step.num_tokens
    own = [torch.randn(num_heads) for _ in range(3)]
    x = step.random(count, num_heads, head_dim)
    steps = step.random(count, num_heads) * 9
    b = step.random(count, groups, size)
    c = step.random(count, groups, size)
    step.compare("chunked_scan", x, steps, own[0], limits, own[1], b, c, own[2])


@SOME
@given(
    lengths_of_rows,
    st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    st.sampled_from([1, 8, 19]),
    st.sampled_from([1, 5, 16, 33]),
    st.booleans(),
    st.integers(0, 99),
)
def test_gated_delta_rule(
    lengths: list[int],
    heads: tuple[int, int],
    head_dim: int,
    size: int,
    per_channel: bool,
    seed: int,
) -> None:
    num_heads, groups = heads
    step = Step(lengths, num_heads, head_dim, size, seed=seed)
    decays = (size,) if per_channel else ()
    count = step.num_tokens
    q = step.random(count, groups, size)
    k = step.random(count, groups, size)
    v = step.random(count, num_heads, head_dim)
    steps = step.random(count, num_heads, *decays) * 3
    beta = step.random(count, num_heads)
    step.compare(
        "gated_delta_rule",
        q,
        k,
        v,
        steps,
        torch.randn(num_heads, *decays),
        torch.randn(num_heads),
        beta,
    )


@SOME
@given(
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([1, 8, 19, 32]),
    st.sampled_from(["all", "shared", ""]),
    st.booleans(),
)
def test_gated_norm(tokens: int, parts: int, size: int, kind: str, gates_first: bool) -> None:
    step = Step([1], 1)
    x = step.random(tokens, parts * size)
    gate = step.random(tokens, parts * size) * 20
    weight = None if not kind else torch.randn(size if kind == "shared" else parts * size)
    found = states.gated_norm(x, gate, weight, 1e-5, size, gates_first)
    torch.testing.assert_close(
        found, state_ops.gated_norm(x, gate, weight, 1e-5, size, gates_first), atol=1e-5, rtol=1e-5
    )


def test_a_recording_computes_the_rows_of_each_step() -> None:
    """One recording, replayed with other rows, lengths and blocks."""
    step = Step([], 4, 8, 16)
    weight = torch.randn(32, 4)
    own = [torch.randn(4) for _ in range(3)]
    past = torch.randn(10, 32, 3)
    buffer = torch.randn(60, 72)

    order = torch.randperm(32)

    def run(x: Tensor) -> tuple[Tensor]:
        values = states.causal_conv(x[:, :32], weight, None, past, step.rows, True).view(-1, 4, 8)
        b, c = x[:, 32:64].unflatten(-1, (2, 1, 16)).unbind(1)
        y = states.chunked_scan(
            values, x[:, 64:68], own[0], (0.0, 9.0), own[1], b, c, own[2], step.state, step.rows
        )
        y = y.flatten(1).index_select(1, order)
        return (
            states.gated_norm(y * 0.5 + y.relu() * y.sigmoid(), x[:, :32], None, 0.0, 32, True)
            * weight[:, 0].contiguous(),
        )

    recording = NativeReplay().record(run, [buffer])
    for lengths in ([1, 1, 1], [5, 1, 40], [60], [1]):
        step.fill(lengths)
        buffer.normal_()
        memory = step.memory.clone()
        inputs = past.clone()
        found = recording(step.num_tokens)[0].clone()
        after = step.memory.clone()
        inputs_after = past.clone()
        step.memory.copy_(memory)
        past.copy_(inputs)
        torch.testing.assert_close(found, run(buffer[: step.num_tokens])[0], atol=1e-5, rtol=1e-5)
        assert torch.equal(after, step.memory) and torch.equal(inputs_after, past)
