"""Recorded forwards equal eager ones for any number of tokens; buffers that share memory are never alive at the same time."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_kernel_cpu import elementwise
from pegboard_kernel_cpu.block_weight import NativeBlockWeight
from pegboard_kernel_cpu.float_weight import NativeFloatWeight
from pegboard_kernel_cpu.library import Library
from pegboard_kernel_cpu.recorder import NativeRecorder

from pegboard.errors import CannotRecord
from pegboard.ops.blocks import Blocks

pytestmark = pytest.mark.usefixtures("native")


def _weight(rows: int, columns: int, in_blocks: bool, seed: int) -> NativeBlockWeight | NativeFloatWeight:
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


def _feed_forward(in_blocks: bool, layers: int, bias: torch.Tensor | None):
    """(norm, up, activation, down, norm weight) per layer, and the same layers computed eagerly."""
    weights = [(_weight(128, 64, in_blocks, 2 * i).bind(), _weight(64, 64, in_blocks, 2 * i + 1).bind()) for i in range(layers)]
    scale = torch.rand(64) + 0.5

    def record(recorder: NativeRecorder, hidden):
        residual, x = hidden, elementwise.rms_norm.record(recorder, hidden, scale, 1e-5)
        for up, down in weights:
            gated = elementwise.silu_mul.record(recorder, up.record(recorder, x))
            x, residual = elementwise.add_rms_norm.record(recorder, down.record(recorder, gated, bias), residual, scale, 1e-5)
        return x

    def eager(hidden: torch.Tensor) -> torch.Tensor:
        residual, x = hidden.clone(), elementwise.rms_norm(hidden, scale, 1e-5)
        for up, down in weights:
            y = down(elementwise.silu_mul(up(x)))
            x, residual = elementwise.add_rms_norm(y if bias is None else y + bias, residual, scale, 1e-5)
        return x

    return record, eager


@settings(max_examples=8, deadline=None)
@given(st.booleans(), st.integers(1, 5), st.booleans(), st.lists(st.integers(1, 50), min_size=1, max_size=4))
def test_a_program_equals_the_eager_calls(in_blocks: bool, layers: int, has_bias: bool, counts: list[int]) -> None:
    record, eager = _feed_forward(in_blocks, layers, torch.randn(64) if has_bias else None)
    recorder = NativeRecorder(50)
    program = recorder.finish(record(recorder, recorder.hidden(64)))
    for count in counts:
        x = torch.randn(count, 64)
        assert torch.allclose(program(x, torch.arange(count)), eager(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_a_program_starts_from_token_ids_or_is_entered_behind_them(in_blocks: bool) -> None:
    record, eager = _feed_forward(in_blocks, 2, None)
    if in_blocks:
        table: NativeBlockWeight | NativeFloatWeight = NativeBlockWeight((90, 64), torch.float32, "cpu", is_table=True)
        table.write(0, Blocks(8, 32, torch.randint(-127, 128, (90, 64)).to(torch.int8), torch.rand(90, 2) * 0.02))
    else:
        table = NativeFloatWeight((90, 64), torch.float32, "cpu", keep_plain=True)
        table.plain().normal_()
    table.finish()
    look_up, recorder = table.bind_lookup(), NativeRecorder(20)
    hidden = look_up.record(recorder, recorder.token_ids())
    recorder.enter(hidden)
    program = recorder.finish(record(recorder, hidden))
    for count in (1, 7, 20):
        ids = torch.randint(0, 90, (count,))
        expected = eager(look_up(ids))
        assert torch.allclose(program(ids), expected, atol=1e-5, rtol=1e-4)
        assert torch.allclose(program(look_up(ids)), expected, atol=1e-5, rtol=1e-4)


@settings(max_examples=8, deadline=None)
@given(st.booleans(), st.integers(1, 3), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_a_head_computes_on_what_the_forward_left_or_on_other_rows(in_blocks: bool, layers: int, counts: list[int]) -> None:
    record, eager = _feed_forward(in_blocks, layers, None)
    head = _weight(77, 64, in_blocks, 99).bind()
    table = NativeFloatWeight((90, 64), torch.float32, "cpu", keep_plain=True)
    table.plain().normal_()
    table.finish()
    look_up, recorder = table.bind_lookup(), NativeRecorder(60)
    hidden = look_up.record(recorder, recorder.token_ids())
    recorder.enter(hidden)
    output = record(recorder, hidden)
    program = recorder.finish(output, head.record(recorder, recorder.head(output, 9)))
    for count in counts:
        ids = torch.randint(0, 90, (60,))
        expected = eager(look_up(ids))
        index = torch.randperm(60)[:count]
        rows = program(ids)[index]
        assert torch.allclose(rows, expected[index], atol=1e-5, rtol=1e-4)
        assert torch.allclose(program.logits(rows), head(expected[index]), atol=1e-4, rtol=1e-3)
        found, logits = program.step(ids[:count])
        assert torch.allclose(found, expected[:count], atol=1e-5, rtol=1e-4)
        assert torch.allclose(logits, head(expected[:count]), atol=1e-4, rtol=1e-3)


def test_a_head_that_was_given_up_leaves_the_forward() -> None:
    record, eager = _feed_forward(True, 1, None)
    recorder, head = NativeRecorder(9), _weight(77, 64, True, 99).bind()
    output = record(recorder, recorder.hidden(64))
    head.record(recorder, recorder.head(output, 4))
    program, x = recorder.finish(output), torch.randn(9, 64)
    assert torch.allclose(program(x), eager(x), atol=1e-5, rtol=1e-4)


def test_quantizing_is_left_to_the_kernel_that_computes() -> None:
    record, _ = _feed_forward(True, 3, None)
    recorder = NativeRecorder(8)
    recorder.finish(record(recorder, recorder.hidden(64)))
    assert "quantize" not in {call.kernel for call in recorder.calls}


def test_rows_of_tables_at_the_positions() -> None:
    recorder = NativeRecorder(16)
    hidden = recorder.hidden(8)
    table = torch.randn(10, 8)
    (rows,) = recorder.at_positions((table,))
    out, _ = elementwise.add_rms_norm.record(recorder, rows, hidden, torch.ones(8), 1e-5)
    program = recorder.finish(out)
    for positions in (torch.tensor([4, 0, 9, 2, 2]), torch.tensor([1]), torch.arange(20)[::2][:3]):
        x = torch.randn(len(positions), 8)
        expected, _ = elementwise.add_rms_norm(table[positions], x.clone(), torch.ones(8), 1e-5)
        assert torch.allclose(program(x, positions), expected, atol=1e-6)


def test_buffers_alive_together_do_not_overlap() -> None:
    record, _ = _feed_forward(True, 6, None)
    recorder = NativeRecorder(32)
    program = recorder.finish(record(recorder, recorder.hidden(64)))
    buffers = {value.buffer for call in recorder.calls for value in (*call.reads.values(), *call.writes.values())}
    for one in buffers:
        for other in buffers - {one}:
            if one.first <= other.last and other.first <= one.last:
                assert (
                    one.address + one.token_bytes * 32 <= other.address or other.address + other.token_bytes * 32 <= one.address
                )
    assert program.arena.numel() < sum(buffer.token_bytes for buffer in buffers) * 32 / 3


def test_programs_of_several_threads_take_turns(native: Library) -> None:
    record, eager = _feed_forward(True, 3, None)
    x = torch.randn(20, 64)
    expected, wrong = eager(x), []

    def work() -> None:
        recorder = NativeRecorder(20)
        program = recorder.finish(record(recorder, recorder.hidden(64)))
        for _ in range(50):
            if not torch.allclose(program(x, torch.arange(20)), expected, atol=1e-5):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_rows_without_weights_are_not_recorded() -> None:
    """Rows that only pad the vocabulary give zeros, which shared memory does not guarantee, so they cannot be recorded."""
    weight = NativeBlockWeight((48, 64), torch.float32, "cpu")
    weight.write(0, Blocks(8, 32, torch.ones(32, 64, dtype=torch.int8), torch.ones(32, 2)))
    weight.finish()
    linear, x = weight.bind(), torch.randn(3, 64)
    assert (linear(x)[:, 32:] == 0).all()
    recorder = NativeRecorder(4)
    with pytest.raises(CannotRecord, match="padded vocabulary"):
        linear.record(recorder, recorder.hidden(64))
