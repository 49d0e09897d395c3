"""Ops with states against the formula token by token: any split of a prompt, any mix of rows, and
states that are not read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import normalize, silu, softplus

from pegboard import ops
from pegboard.errors import CannotRecord, ModelError
from pegboard.interfaces.attention import AttentionInputs, KVTensor
from pegboard.layers import StateLayer
from pegboard.worker.attention_groups import StateGroup
from pegboard_models import state_ops
from pegboard_models.parameters import Parameters
from pegboard_models.short_conv import ShortConv
from pegboard_models.state_ops import CHUNK
from pegboard_testing.fake_build import fake_build, load_layers

BLOCKS = 5
CHANNELS = 6
WIDTH = 4
HEADS = 4
GROUPS = 2
HEAD_DIM = 3
STATE = 5
LIMITS = (0.2, 1.5)
Op = Callable[[dict[str, Tensor], Tensor, ops.StateRows], Tensor]


def inputs_of(num_tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random inputs of all ops for these tokens, and weights that do not depend on the tokens."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "weight": random(CHANNELS, WIDTH),
        "bias": random(CHANNELS),
        "skip": random(CHANNELS),
        "head_skip": random(HEADS),
        "a_log": random(CHANNELS, STATE),
        "head_a_log": random(HEADS),
        "head_bias": random(HEADS),
        "x": random(num_tokens, CHANNELS),
        "steps": random(num_tokens, CHANNELS),
        "head_steps": random(num_tokens, HEADS) * 2,
        "b": random(num_tokens, GROUPS, STATE),
        "c": random(num_tokens, GROUPS, STATE),
        "heads": random(num_tokens, HEADS, HEAD_DIM),
        "beta": random(num_tokens, HEADS),
        "channel_bias": random(HEADS, STATE),
        "channel_steps": random(num_tokens, HEADS, STATE) * 2,
    }


def conv(own: dict[str, Tensor], state: Tensor, rows: ops.StateRows) -> Tensor:
    return state_ops.causal_conv(own["x"], own["weight"], own["bias"], state, rows, True)


def scan(own: dict[str, Tensor], state: Tensor, rows: ops.StateRows) -> Tensor:
    return state_ops.selective_scan(
        own["x"],
        own["steps"],
        own["a_log"],
        own["b"][:, 0],
        own["c"][:, 0],
        own["skip"],
        state,
        rows,
    )


def delta(own: dict[str, Tensor], state: Tensor, rows: ops.StateRows) -> Tensor:
    bias = own["head_bias"]
    a_log = own["head_a_log"]
    return state_ops.gated_delta_rule(
        own["b"], own["c"], own["heads"], own["head_steps"], bias, a_log, own["beta"], state, rows
    )


def delta_of_channels(own: dict[str, Tensor], state: Tensor, rows: ops.StateRows) -> Tensor:
    bias = own["channel_bias"]
    a_log = own["head_a_log"]
    return state_ops.gated_delta_rule(
        own["b"],
        own["c"],
        own["heads"],
        own["channel_steps"],
        bias,
        a_log,
        own["beta"],
        state,
        rows,
    )


def chunks(own: dict[str, Tensor], state: Tensor, rows: ops.StateRows) -> Tensor:
    steps = own["head_steps"], own["head_bias"], LIMITS
    return state_ops.chunked_scan(
        own["heads"], *steps, own["head_a_log"], own["b"], own["c"], own["head_skip"], state, rows
    )


def sums(own: dict[str, Tensor], state: Tensor, rows: ops.StateRows) -> Tensor:
    keys = 9 * own["steps"]
    return state_ops.wkv(keys, own["x"], -own["skip"].exp(), own["bias"], state, rows)


OPS: dict[str, tuple[Op, tuple[int, ...]]] = {
    "causal_conv": (conv, (CHANNELS, WIDTH - 1)),
    "selective_scan": (scan, (CHANNELS, STATE)),
    "chunked_scan": (chunks, (HEADS, HEAD_DIM, STATE)),
    "wkv": (sums, (CHANNELS, 3)),
    "gated_delta_rule": (delta, (HEADS, HEAD_DIM, STATE)),
    "gated_delta_rule, channels": (delta_of_channels, (HEADS, HEAD_DIM, STATE)),
}
PER_TOKEN = ("x", "steps", "head_steps", "b", "c", "heads", "beta", "channel_steps")


def formula(name: str, own: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The outputs and the last state of one new request, in float64 and one token at a time."""
    own = {key: value.double() for key, value in own.items()}
    state = torch.zeros(OPS[name][1], dtype=torch.float64)
    outputs = []
    for t in range(len(own["x"])):
        if name == "causal_conv":
            window = torch.cat((state, own["x"][t, :, None]), 1)
            out = silu((window * own["weight"]).sum(1) + own["bias"])
            state = window[:, 1:]
        elif name == "selective_scan":
            step = softplus(own["steps"][t, :, None])
            state = (step * -own["a_log"].exp()).exp() * state + step * own["x"][t, :, None] * own[
                "b"
            ][t, 0]
            out = state @ own["c"][t, 0] + own["skip"] * own["x"][t]
        elif name == "wkv":
            key = 9 * own["steps"][t]
            weight = (key + own["bias"]).exp()
            out = (state[:, 0] + weight * own["x"][t]) / (state[:, 1] + weight)
            state = state * (-own["skip"].exp()).exp()[:, None]
            state[:, 0] += key.exp() * own["x"][t]
            state[:, 1] += key.exp()
        elif name.startswith("gated_delta_rule"):
            q, k = (
                normalize(own[key][t], eps=0).repeat_interleave(HEADS // GROUPS, 0)
                for key in ("b", "c")
            )
            kind = "channel" if "channels" in name else "head"
            decay = (
                softplus(own[f"{kind}_steps"][t] + own[f"{kind}_bias"]).view(HEADS, -1)
                * -own["head_a_log"].exp()[:, None]
            )
            state = state * decay.exp()[:, None]
            change = own["beta"][t].sigmoid()[:, None] * (
                own["heads"][t] - torch.einsum("hpk,hk->hp", state, k)
            )
            state = state + change[:, :, None] * k[:, None]
            out = torch.einsum("hpk,hk->hp", state, q) / STATE**0.5
        else:
            b = own["b"][t].repeat_interleave(HEADS // GROUPS, 0)
            c = own["c"][t].repeat_interleave(HEADS // GROUPS, 0)
            step = softplus(own["head_steps"][t] + own["head_bias"]).clamp(*LIMITS)
            state = (step * -own["head_a_log"].exp()).exp()[:, None, None] * state
            state = state + (step[:, None] * own["heads"][t])[:, :, None] * b[:, None]
            out = torch.einsum("hpn,hn->hp", state, c) + own["head_skip"][:, None] * own["heads"][t]
        outputs.append(out)
    return torch.stack(outputs), state


def rows_of(blocks: list[int], starts: list[int], lengths: list[int]) -> ops.StateRows:
    """The rows of a step as the worker makes them. starts: tokens of each row before the step."""
    loc = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    seq_lens = np.array(starts, np.int32) + np.array(lengths, np.int32)
    table = np.array(blocks, np.int32)[:, None]
    group = StateGroup()
    group.plan(
        AttentionInputs(
            num_rows=len(blocks),
            num_tokens=int(loc[-1]),
            query_start_loc=torch.from_numpy(loc),
            query_start_loc_cpu=loc,
            seq_lens=torch.from_numpy(seq_lens),
            seq_lens_cpu=seq_lens,
            block_table=torch.from_numpy(table),
            block_table_cpu=table,
            slot_mapping=torch.zeros(0, dtype=torch.int64),
        )
    )
    return group.rows


@pytest.mark.parametrize("name", OPS)
@settings(deadline=None, max_examples=8)
@given(
    pieces=st.lists(
        st.lists(st.sampled_from([1, 1, 2, 3, CHUNK + 7]), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    seed=st.integers(0, 1000),
)
def test_any_split_and_any_batch_is_the_formula(
    name: str, pieces: list[list[int]], seed: int
) -> None:
    """Each request is computed in its pieces, one per step together with the other requests, in
    blocks full of garbage."""
    (op, shape) = OPS[name]
    generator = torch.Generator().manual_seed(seed)
    requests = [inputs_of(sum(own), generator) for own in pieces]
    weights = requests[0]
    requests = [{**weights, **{key: own[key] for key in PER_TOKEN}} for own in requests]
    blocks = [3, 1, 4][: len(pieces)]
    state = torch.full((BLOCKS, *shape), float("nan"))
    found: list[list[Tensor]] = [[] for _ in pieces]
    for step in range(max(map(len, pieces))):
        active = [r for r, own in enumerate(pieces) if step < len(own)]
        starts = [sum(pieces[r][:step]) for r in active]
        lengths = [pieces[r][step] for r in active]
        spans = [
            slice(start, start + length) for start, length in zip(starts, lengths, strict=True)
        ]
        batch = {
            key: torch.cat([requests[r][key][span] for r, span in zip(active, spans, strict=True)])
            for key in PER_TOKEN
        }
        out = op({**weights, **batch}, state, rows_of([blocks[r] for r in active], starts, lengths))
        for r, part in zip(active, out.split(lengths), strict=True):
            found[r].append(part)
    for r, own in enumerate(requests):
        expected, last = formula(name, own)
        size = expected.abs().max().item() + 1
        assert (torch.cat(found[r]).double() - expected).abs().max() < 2e-5 * size
        after = state[blocks[r]].double()
        if name == "wkv":  # both sums are divided by the same number
            after = torch.cat((after[:, :2] * after[:, 2:].exp(), after[:, :1] * 0), 1)
        assert (after - last).abs().max() < 2e-5 * (last.abs().max().item() + 1)
    assert all(state[block].isnan().all() for block in range(BLOCKS) if block not in blocks)


@pytest.mark.parametrize("gates_first", [False, True])
def test_gated_norm_normalizes_parts(gates_first: bool) -> None:
    x = torch.randn(3, 8)
    gate = torch.randn(3, 8)
    weight = torch.randn(4)
    for own in (weight, torch.cat((weight, weight))):
        found = state_ops.gated_norm(x, gate, own, 1e-5, 4, gates_first)
        for part in (slice(0, 4), slice(4, 8)):
            factor = silu(gate[:, part])
            expected = x[:, part] * factor if gates_first else x[:, part]
            expected = expected / (expected.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight
            torch.testing.assert_close(
                found[:, part], expected if gates_first else expected * factor
            )
    torch.testing.assert_close(
        state_ops.gated_norm(x, gate, None, 0.0, 8, gates_first), x * silu(gate)
    )


def test_a_state_layer_gets_its_memory_and_the_steps_rows() -> None:
    build = fake_build()
    layer = StateLayer(build.at("conv"), 3, KVTensor("conv", (CHANNELS, 2), "float32"))
    assert build.declared.states == {3: (KVTensor("conv", (CHANNELS, 2), "float32"),)}
    group = StateGroup()
    states = {"conv": torch.zeros(2, CHANNELS, 2)}
    build.attention[3] = group.bind(states)
    layer.bind()
    group.rows = rows_of([1], [0], [2])
    new = torch.zeros(2, CHANNELS)
    calls = []

    def call(*given: Any) -> Tensor:
        calls.append(given)
        return new

    assert layer(call, CHANNELS, new) is new
    assert calls == [(states, group.rows, new)]
    with pytest.raises(ModelError, match="layer index 3 already has a cache"):
        StateLayer(build, 3)


def test_parameters_keep_the_type_that_was_asked_for() -> None:
    build = fake_build()
    own = Parameters(build.at("mixer"), {"D": (2,)}, "float32")
    short = ShortConv(build.at("conv1d"), 2, 3, bias=False, activates=False)
    weights: dict[str, Any] = {
        "mixer.D": torch.tensor([1.0, 2.0]),
        "conv1d.weight": torch.tensor([[[1.0, 2, 3]], [[0, 0, 1]]]),
    }
    load_layers([own, short], weights)
    assert own["D"].tolist() == [1, 2] and own["D"].dtype == torch.float32
    assert [id(t) for holder in own.holders() for t in holder.tensors()] == [id(own["D"])]
    x = torch.tensor([[1.0, 5.0], [2.0, 6.0]])
    assert short(x, torch.zeros(1, 2, 2), rows_of([0], [0], [2])).tolist() == [[3, 5], [8, 6]]


def padded_rows(blocks: list[int], starts: list[int], count: int) -> ops.StateRows:
    """The rows of a decode that is padded to `count` rows."""
    num_rows = len(blocks)
    rest = [0] * (count - num_rows)
    return ops.StateRows(
        torch.tensor([*blocks, *rest], dtype=torch.int32)[:, None],
        torch.tensor([*(start + 1 for start in starts), *rest], dtype=torch.int32),
        torch.arange(count + 1, dtype=torch.int32).clamp(max=num_rows),
        None,
    )


@pytest.mark.parametrize("name", OPS)
@given(starts=st.lists(st.sampled_from([0, 3]), max_size=3), more=st.integers(1, 3))
def test_padding_changes_no_state(name: str, starts: list[int], more: int) -> None:
    """Also if the real rows have no tokens, as when a step is recorded."""
    op, shape = OPS[name]
    blocks = [3, 1, 4][: len(starts)]
    count = len(starts) + more
    generator = torch.Generator().manual_seed(count)
    own = inputs_of(count, generator)
    state = torch.randn(BLOCKS, *shape, generator=generator)
    alone = state.clone()
    out = op(own, state, padded_rows(blocks, starts, count))
    assert out.isfinite().all()
    if starts:
        real = {key: x[: len(starts)] if key in PER_TOKEN else x for key, x in own.items()}
        expected = op(real, alone, rows_of(blocks, starts, [1] * len(starts)))
        torch.testing.assert_close(out[: len(starts)], expected)
    torch.testing.assert_close(state, alone)


def test_a_recording_finds_the_rows_again() -> None:
    """A recording is computed once before it is captured, so nothing may be left from then."""
    rows = padded_rows([3, 1], [0, 2], 3)
    assert rows.single[1].tolist() == [3, 1, 3] and rows.single[2].tolist() == [True, False, True]
    rows.table[:, 0] = torch.tensor([2, 4, 1])
    rows.seq_lens[:] = torch.tensor([7, 1, 2])
    rows.query_start_loc[3] = 3
    assert rows.single[1].tolist() == [2, 4, 1] and rows.single[2].tolist() == [False, True, False]


def test_the_reference_does_not_record_drafts() -> None:
    rows = padded_rows([3], [0], 2)
    rows.table = rows.table.expand(-1, 2)
    with pytest.raises(CannotRecord, match="cannot replay drafts"):
        conv(inputs_of(2, torch.Generator()), torch.zeros(BLOCKS, CHANNELS, WIDTH - 1), rows)
