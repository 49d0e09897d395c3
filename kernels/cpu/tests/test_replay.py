"""Recorded forwards equal eager ones for any number of tokens. Buffers that share memory are never
needed at the same time."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_kernel_cpu import elementwise
from pegboard_kernel_cpu.block_weight import NativeBlockWeight
from pegboard_kernel_cpu.float_weight import NativeFloatWeight
from pegboard_kernel_cpu.library import Library, library
from pegboard_kernel_cpu.lora import lora_add
from pegboard_kernel_cpu.onednn_weight import OneDNNFloatWeight
from pegboard_kernel_cpu.replay import NativeReplay, Program
from torch.nn import functional

from pegboard.errors import CannotRecord
from pegboard.ops.blocks import Blocks
from pegboard_testing.fake_build import adapter_rows

pytestmark = pytest.mark.usefixtures("native")


def _weight(
    rows: int, columns: int, in_blocks: bool, seed: int
) -> NativeBlockWeight | NativeFloatWeight:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator) / columns**0.5
    if not in_blocks:
        weight = NativeFloatWeight((rows, columns), torch.float32, "cpu")
        weight.plain().copy_(matrix)
        weight.finish()
        return weight
    parts = matrix.view(rows, -1, 32)
    scale = parts.abs().amax(-1) / 127
    codes = torch.round(parts / scale[..., None]).to(torch.int8).view(rows, columns)
    blocks = NativeBlockWeight((rows, columns), torch.float32, "cpu")
    blocks.write(0, Blocks(8, 32, codes, scale))
    blocks.finish()
    return blocks


def _feed_forward(in_blocks: bool, layers: int, bias: torch.Tensor | None = None):
    """Return a function [T, 64] → [T, 64]: gated layers with a norm before each."""
    weights = [
        (_weight(128, 64, in_blocks, 2 * i).bind(), _weight(64, 64, in_blocks, 2 * i + 1).bind())
        for i in range(layers)
    ]
    scale = torch.rand(64) + 0.5

    def run(hidden: torch.Tensor) -> torch.Tensor:
        residual = hidden
        x = elementwise.rms_norm(hidden, scale, 1e-5)
        for up, down in weights:
            y = down(elementwise.silu_mul(up(x)))
            x, residual = elementwise.add_rms_norm(
                y if bias is None else y.add_(bias), residual, scale, 1e-5
            )
        return x

    return run


def _table(in_blocks: bool) -> NativeBlockWeight | NativeFloatWeight:
    if in_blocks:
        table: NativeBlockWeight | NativeFloatWeight = NativeBlockWeight(
            (90, 64), torch.float32, "cpu", is_table=True
        )
        table.write(
            0,
            Blocks(
                8, 32, torch.randint(-127, 128, (90, 64)).to(torch.int8), torch.rand(90, 2) * 0.02
            ),
        )
    else:
        table = NativeFloatWeight((90, 64), torch.float32, "cpu", is_table=True)
        table.plain().normal_()
    table.finish()
    return table


def _record(run: Any, *inputs: torch.Tensor, replay: NativeReplay | None = None) -> Program:
    found = lambda *values: made if isinstance(made := run(*values), tuple) else (made,)  # noqa: E731
    return (replay or NativeReplay()).record(found, list(inputs))


@settings(max_examples=8, deadline=None)
@given(
    st.booleans(),
    st.integers(1, 5),
    st.booleans(),
    st.lists(st.integers(1, 50), min_size=1, max_size=4),
)
def test_a_recording_equals_the_eager_calls(
    in_blocks: bool, layers: int, has_bias: bool, counts: list[int]
) -> None:
    run = _feed_forward(in_blocks, layers, torch.randn(64) if has_bias else None)
    x = torch.zeros(50, 64)
    recording = _record(run, x)
    for count in counts:
        given = x[:count].normal_().clone()
        (found,) = recording(count)
        # a bias that is added earlier may change how the next layer rounds an activation
        is_rounded = count >= library().constant("blocks_rounded_from")
        error = 2e-2 if in_blocks and has_bias and is_rounded else 1e-5
        assert torch.allclose(found, run(given), atol=error, rtol=1e-4)


@pytest.mark.parametrize("most", [1, 20])
def test_functions_on_other_shapes_are_recorded(most: int) -> None:
    """Those of transformers' modules: [1, T, n], [1, heads, T, n], numbers per head and per
    token. With one token at most, several dimensions could be that of the tokens."""
    per_channel = torch.randn(16)
    per_head = torch.randn(4, 1, 16)
    table = torch.randn(9, 16)

    def halves(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((-x[..., 8:], x[..., :8]), dim=-1)

    def run(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = x[None]
        scale = (hidden.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        heads = (hidden * scale).view(1, -1, 4, 16).transpose(1, 2)
        turn = functional.embedding(ids[None], table).unsqueeze(1)
        turned = (heads * turn) + (halves(heads) * turn)
        normed = functional.layer_norm(turned, (16,), 1 + per_channel, per_channel)
        normed = functional.rms_norm(normed - per_head, (16,), per_channel, 1e-6)
        normed = normed / (turned.pow(2) + 1)
        pairs = torch.stack((normed[..., 8:], normed[..., ::2]), -1).flatten(-2)
        pairs = torch.cat([pairs[..., ::2], pairs[..., 1::2] ** 3], -1)
        means = functional.dropout(pairs, training=False).mean((-1,))
        rows = pairs.transpose(1, 2).contiguous().reshape(1, -1, 64)[0]
        return (rows, means.transpose(1, 2)[0], halves(x), 2 * x[:, 3:5] - x[:, 1:3])

    x = torch.zeros(most, 64)
    ids = torch.zeros(most, dtype=torch.int64)
    recording = NativeReplay().record(run, [x, ids])
    for count in {1, most, min(most, 7)}:
        given = x[:count].normal_().clone(), ids[:count].random_(0, 9).clone()
        for found, expected in zip(recording(count), run(*given), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_what_is_computed_from_weights_follows_them() -> None:
    weight = torch.ones(64)
    other = torch.ones(64)

    def run(x: torch.Tensor) -> torch.Tensor:
        torch.exp(other)  # nothing holds it
        return x * (1 + weight.float()).sqrt() + torch.stack([weight, other]).mean(0)

    x = torch.zeros(9, 64)
    recording = _record(run, x)
    x.normal_()
    for _ in range(3):
        (found,) = recording(9)
        torch.testing.assert_close(found, run(x))
        weight.copy_(torch.rand(64))
        other.add_(1)


@pytest.mark.parametrize("columns", [24, 4100])
def test_functions_of_torch_are_recorded(columns: int) -> None:
    """4100 columns are two tasks per row."""
    x = torch.zeros(9, columns)
    order = torch.arange(columns, 0, -1)

    def run(x: torch.Tensor) -> torch.Tensor:
        found = [
            functional.gelu(x),
            functional.gelu(x, approximate="tanh"),
            functional.silu(x),
            torch.tanh(x / 3) * 3,
        ]
        found += [
            functional.relu(x).square(),
            x.clone(),
            x[:, 1:3] + x[:, 2:4],
            x.clamp(-0.5, 0.5),
            functional.elu(x),
        ]
        return torch.cat([*found, torch.cat([x, x], 1).index_select(1, order)], -1)

    recording = _record(run, x)
    for count in (1, 9, 4):
        given = x[:count].normal_(std=3).clone()
        (found,) = recording(count)
        assert torch.allclose(found, run(given), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda x: torch.add(x, x, alpha=2), "add with alpha=2"),
        (lambda x: torch.div(x, 2, rounding_mode="floor"), "div with rounding_mode='floor'"),
        (lambda x: functional.relu(x, inplace=True), "relu with inplace=True"),
        (lambda x: functional.elu(x, alpha=2.0), "elu with alpha=2.0"),
        (lambda x: x.clamp(-1, 2), "clamp from -1 to 2"),
        (lambda x: x.clamp(max=2), "clamp from None to 2"),
    ],
)
def test_arguments_that_change_a_function_are_named(run: Any, words: str) -> None:
    with pytest.raises(CannotRecord, match=re.escape(words)):
        _record(run, torch.zeros(9, 8))


def test_operators_of_a_library_are_named() -> None:
    """oneDNN takes no tensors without memory. The step runs without a recording."""
    weight = OneDNNFloatWeight((8, 8), torch.float32, "cpu")
    weight.plain().normal_()
    weight.finish()
    product = weight.bind()
    with pytest.raises(CannotRecord, match="computes _linear_pointwise"):
        _record(product, torch.zeros(9, 8))


@pytest.mark.parametrize("has_bias", [False, True])
def test_products_side_by_side_are_written_next_to_each_other(has_bias: bool) -> None:
    """Parts of a weight in different forms. No call copies them."""
    parts = [
        _weight(rows, 64, in_blocks, rows).bind()
        for rows, in_blocks in ((32, True), (16, False), (24, True))
    ]
    down = _weight(64, 72, False, 9).bind()
    bias = torch.randn(72)
    x = torch.zeros(20, 64)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([part(x) for part in parts], -1)
        return down(y.add_(bias) if has_bias else y)

    recording = _record(run, x)
    assert [call.kernel for call in recording.calls] == [
        "quantize",
        "linear_blocks",
        "linear_float",
        "linear_blocks",
        "linear_float",
    ]
    for count in (1, 20, 7):
        given = x[:count].normal_().clone()
        (found,) = recording(count)
        assert torch.allclose(found, run(given), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize(
    "slots", [[0], [1], [2, 0, 1, 1, 2, 2, 0, 1, 2]], ids=["base model", "one adapter", "mixed"]
)
def test_adapters_are_multiplied_beside_the_layer(in_blocks: bool, slots: list[int]) -> None:
    """A x is computed at the same time as W x, so it takes one instruction less, and no memory that
    W x reads."""
    up = _weight(96, 64, in_blocks, 1).bind()
    down = _weight(64, 96, in_blocks, 2).bind()
    ranks = torch.tensor([16, 3], dtype=torch.int32)
    shapes = [((2, 64, 16), (2, 16, 96)), ((2, 96, 16), (2, 16, 64))]
    adapters = [tuple(torch.randn(shape) / 8 for shape in pair) for pair in shapes]
    rows = adapter_rows(slots, 2)

    def run(x: torch.Tensor) -> torch.Tensor:
        for weight, (a, b) in zip((up, down), adapters, strict=True):
            x = lora_add(weight(x), x, a, b, ranks, (0, b.shape[2]), rows)
        return x

    recording = _record(run, given := torch.zeros(len(slots), 64))
    x = torch.randn(len(slots), 64)
    assert len(recording.calls) - len(recording._due) == 2
    for _ in range(20):  # with different threads for each task
        given.copy_(x)
        (found,) = recording(len(slots))
        assert torch.allclose(found, run(x), atol=1e-5, rtol=1e-4)


def test_what_linear_kernels_cannot_write_next_to_each_other_is_copied() -> None:
    weight = _weight(64, 64, False, 1).bind()
    x = torch.zeros(4, 64)

    def of_an_input(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([weight(x), x], -1)

    def read_before(x: torch.Tensor) -> torch.Tensor:
        y = weight(x)
        return torch.cat([weight(y), y], -1)

    def twice(x: torch.Tensor) -> torch.Tensor:
        y = weight(x)
        return torch.cat([y, y], -1)

    for run in (of_an_input, read_before, twice):
        recording = _record(run, x)
        given = x.normal_().clone()
        (found,) = recording(4)
        assert torch.allclose(found, run(given), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_from_token_ids_to_logits_in_one_call(in_blocks: bool) -> None:
    run = _feed_forward(in_blocks, 2)
    look_up = _table(in_blocks).bind_lookup()
    head = _weight(77, 64, in_blocks, 99).bind()
    ids = torch.zeros(20, dtype=torch.int64)
    rows = torch.zeros(9, 64)
    replay = NativeReplay()

    def decode(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = run(look_up(ids))
        return hidden, head(hidden)

    whole = _record(decode, ids, replay=replay)
    alone = _record(head, rows, replay=replay)
    for count in (1, 7, 20):
        ids[:count] = torch.randint(0, 90, (count,))
        expected = run(look_up(ids[:count]))
        hidden, logits = whole(count)
        assert torch.allclose(hidden, expected, atol=1e-5, rtol=1e-4)
        assert torch.allclose(logits, head(expected), atol=1e-4, rtol=1e-3)
        rows[:3] = expected[torch.randint(0, count, (3,))]
        assert torch.allclose(alone(3)[0], head(rows[:3]), atol=1e-4, rtol=1e-3)


def test_recordings_share_one_memory_and_a_larger_one_moves_them() -> None:
    replay = NativeReplay()
    small = torch.randn(4, 64)
    large = torch.randn(300, 64)
    run = _feed_forward(True, 2)
    first = _record(run, small, replay=replay)
    before = replay.arena.numel()
    expected = run(small.clone())
    wanted = run(large.clone())
    second = _record(run, large, replay=replay)
    assert replay.arena.numel() > before and replay.arena.numel() < before * 100
    assert torch.allclose(first(4)[0], expected, atol=1e-5)
    assert torch.allclose(second(300)[0], wanted, atol=1e-4)
    assert (
        first._tensors[0].untyped_storage().data_ptr()
        == second._tensors[0].untyped_storage().data_ptr()
    )
    replay.reset()
    assert replay.programs == []


def test_quantizing_is_left_to_the_kernel_that_computes() -> None:
    recording = _record(_feed_forward(True, 3), torch.zeros(8, 64))
    assert "quantize" not in {call.kernel for call in recording.calls}


def test_rows_of_tables_at_the_positions() -> None:
    table = torch.randn(10, 8)
    positions = torch.zeros(16, dtype=torch.int64)
    hidden = torch.zeros(16, 8)
    recording = _record(
        lambda p, h: elementwise.add_rms_norm(table[p], h, torch.ones(8), 1e-5)[0],
        positions,
        hidden,
    )
    for some in ([4, 0, 9, 2, 2], [1], [0, 2, 4]):
        positions[: len(some)] = torch.tensor(some)
        x = hidden[: len(some)].normal_().clone()
        expected, _ = elementwise.add_rms_norm(
            table[positions[: len(some)]], x, torch.ones(8), 1e-5
        )
        assert torch.allclose(recording(len(some))[0], expected, atol=1e-6)


def test_buffers_alive_together_do_not_overlap() -> None:
    recording = _record(_feed_forward(True, 6), torch.zeros(32, 64))
    buffers = recording.buffers
    for one in buffers:
        for other in buffers:
            if one is not other and one.first <= other.last and other.first <= one.last:
                assert (
                    one.address + one.token_bytes * 32 <= other.address
                    or other.address + other.token_bytes * 32 <= one.address
                )
    assert recording.num_bytes < sum(buffer.token_bytes for buffer in buffers) * 32 / 3


def test_recordings_of_several_threads_take_turns(native: Library) -> None:
    run = _feed_forward(True, 3)
    x = torch.randn(20, 64)
    expected = run(x.clone())
    wrong = []

    def work() -> None:
        own = x.clone()
        recording = _record(run, own)
        for _ in range(50):
            own.copy_(x)
            if not torch.allclose(recording(20)[0], expected, atol=1e-5):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_rows_without_weights_are_not_recorded() -> None:
    """A padded vocabulary has such rows. Their results must be zeros, but shared memory holds old
    values."""
    weight = NativeBlockWeight((48, 64), torch.float32, "cpu")
    weight.write(0, Blocks(8, 32, torch.ones(32, 64, dtype=torch.int8), torch.ones(32, 2)))
    weight.finish()
    linear = weight.bind()
    x = torch.randn(3, 64)
    assert (linear(x)[:, 32:] == 0).all()
    with pytest.raises(CannotRecord, match="padded vocabulary"):
        _record(linear, x)


def logarithm(x: torch.Tensor) -> torch.Tensor:
    return x.log()


@pytest.mark.parametrize(
    ("run", "what"),
    [
        (logarithm, r"test_replay.logarithm computes log"),
        (lambda x: x + torch.ones(5, 64), r"computes add"),
        (lambda x: x.add_(torch.ones(64)), r"computes add_"),
        (lambda x: x if x.sum() else -x, r"computes sum"),
        (lambda x: x * x.tolist()[0][0], r"reads values on the host"),
        (lambda x: x * x.numpy(), r"reads values on the host"),
        (lambda x: x * (x.data_ptr() % 7), r"reads memory"),
        (
            lambda x: elementwise.rope(x.view(5, 4, 16), x[:, :8], x[:, :8], False).view(5, 64),
            r"returns something that no kernel",
        ),
    ],
)
def test_what_prevents_a_recording_is_named(run: Any, what: str) -> None:
    with pytest.raises(CannotRecord, match=what):
        _record(run, torch.zeros(5, 64))


def test_a_mistake_in_a_model_stays_one() -> None:
    with pytest.raises(TypeError, match="rms_norm"):
        _record(lambda x: elementwise.rms_norm(x), torch.zeros(5, 64))  # type: ignore[call-arg]
    with pytest.raises(RuntimeError, match="shape"):
        _record(lambda x: x.view(3, 7), torch.zeros(5, 64))


@pytest.mark.parametrize("pairs", [False, True])
def test_rotated_channels_go_to_any_kernel(pairs: bool) -> None:
    """Queries may be normalized after their rotation, be a part of a row, and be partly rotated."""
    weight = torch.rand(16)
    angles = torch.rand(5, 4)

    def run(x: torch.Tensor) -> torch.Tensor:
        heads = x.view(-1, 4, 24)[:, :, 8:]
        turned = elementwise.rope(heads, *rotation, pairs)
        return elementwise.rms_norm(turned, weight, 1e-5).view(-1, 64)

    x = torch.randn(5, 96)
    rotation = angles.cos(), angles.sin()
    expected = run(x)
    replay = NativeReplay()
    inputs = [x, *rotation]

    def recorded(x: Any, cos: Any, sin: Any) -> tuple[torch.Tensor]:
        nonlocal rotation
        rotation = cos, sin
        return (run(x),)

    torch.testing.assert_close(replay.record(recorded, inputs)(5)[0], expected)


def test_rows_are_multiplied_by_a_column() -> None:
    x = torch.randn(5, 64)
    torch.testing.assert_close(_record(lambda x: x * x[:, :1], x)(5)[0], x * x[:, :1])
