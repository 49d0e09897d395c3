"""Weights whose parts differ: side by side, each in its own form, and with transforms of the
activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import LinearLayer, Part, QuantizationSetup
from pegboard.ops.blocks import Blocks, BlockWeight
from pegboard.ops.linear import FloatWeight
from pegboard_testing.contract_quantization import load_pieces, stored_pieces
from pegboard_testing.fake_build import references
from pegboard_testing.held_memory import held_bytes
from pegboard_weights.composed import ColumnScales, Hadamard, MatrixTransform, SideBySide, Transform
from pegboard_weights.stored_weight import FormatMethod, PlainReader, Reader

COLUMNS = 64


class EightBits(PlainReader):
    def form(self, *arguments: Any) -> Any:
        return "block_weight"

    def read(self, part: Part, columns: int, pieces: Any) -> Blocks:
        codes = pieces[part.name].data.to(torch.int8)
        return Blocks(8, 32, codes, torch.ones(len(codes), columns // 32))


class Turned(EightBits):
    def __init__(self, values: Transform) -> None:
        self.values = values

    def transform(self, part: Part, columns: int, pieces: Any) -> Transform:
        return self.values


class Method(FormatMethod):
    def __init__(self, readers: list[Reader | None]) -> None:
        super().__init__(QuantizationSetup({}, "float32", "cpu", references()))
        self.by_module = {f"m.{index}": reader for index, reader in enumerate(readers)}

    def reader(self, module: str, layer: Any) -> Reader | None:
        return self.by_module[module]


def load(weight: Any, rows: tuple[int, ...], seed: int) -> Tensor:
    """Fill the parts with whole numbers. Returns them."""
    values = torch.randint(
        -9, 9, (sum(rows), COLUMNS), generator=torch.Generator().manual_seed(seed)
    ).float()
    pieces = [
        stored_pieces(f"m.{index}", {"weight": part})[0]
        for index, part in enumerate(values.split(rows))
    ]
    load_pieces(weight, pieces)
    return values


def made(rows: tuple[int, ...], *readers: Reader | None, num_experts: int = 0) -> Any:
    starts = [sum(rows[:index]) for index in range(len(rows))]
    parts = tuple(
        Part(f"m.{index}.weight", (start, start + rows[index]))
        for index, start in enumerate(starts)
    )
    weight = Method(list(readers)).linear(
        LinearLayer("m", COLUMNS, sum(rows), parts, num_experts=num_experts)
    )
    assert weight is not None
    return weight


def test_parts_of_other_forms_are_held_side_by_side() -> None:
    rows = (3, 5, 2, 4)
    weight = made(rows, EightBits(), EightBits(), None, EightBits())
    values = load(weight, rows, 1)
    assert [(span.start, span.stop, type(span.op)) for span in weight.spans] == [
        (0, 8, BlockWeight),
        (8, 10, FloatWeight),
        (10, 14, BlockWeight),
    ]
    assert isinstance(weight.weight(), SideBySide) and torch.equal(weight.dequantize(), values)
    call = weight.bind({})
    x = torch.randn(7, COLUMNS)
    torch.testing.assert_close(call(x), x @ values.T, rtol=1e-4, atol=1e-4)
    assert held_bytes(weight) == 4 * values.numel()
    values = load(weight, rows, 2)
    torch.testing.assert_close(call(x), x @ values.T, rtol=1e-4, atol=1e-4)


def hadamard(size: int) -> Tensor:
    """With entries (−1)^(number of ones that the numbers of row and column share)."""
    return (
        torch.tensor(
            [
                [(-1.0) ** (row & column).bit_count() for column in range(size)]
                for row in range(size)
            ]
        )
        / size**0.5
    )


def turned(x: Tensor, matrix: Tensor) -> Tensor:
    return x @ torch.block_diag(*[matrix] * (COLUMNS // len(matrix)))


SCALES = torch.rand(COLUMNS) + 0.5
MATRIX = torch.randn(32, 32)


@pytest.mark.parametrize(
    ("transform", "matrix"),
    [
        (ColumnScales(SCALES), torch.diag(SCALES)),
        (MatrixTransform(MATRIX), MATRIX),
        *((Hadamard(size), hadamard(size)) for size in (1, 2, 16, 64)),
    ],
)
def test_activations_are_transformed(transform: Transform, matrix: Tensor) -> None:
    rows = (3, 5)
    weight = made(rows, Turned(transform), Turned(transform))
    stored = load(weight, rows, 1)
    x = torch.randn(7, COLUMNS)
    expected = turned(x, matrix) @ stored.T
    torch.testing.assert_close(weight.bind({})(x), expected, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(x @ weight.dequantize().T, expected, rtol=1e-5, atol=1e-3)
    assert len(weight.spans) == 1, "both parts take the same transformed activations"


def test_parts_may_have_their_own_transforms() -> None:
    rows = (3, 5, 2)
    weight = made(rows, Turned(ColumnScales(SCALES)), Turned(Hadamard(2)), EightBits())
    stored = load(weight, rows, 1)
    x = torch.randn(7, COLUMNS)
    parts = (x * SCALES) @ stored[:3].T, turned(x, hadamard(2)) @ stored[3:8].T, x @ stored[8:].T
    torch.testing.assert_close(weight.bind({})(x), torch.cat(parts, 1), rtol=1e-5, atol=1e-4)


def test_a_reload_brings_its_own_transform() -> None:
    reader = Turned(ColumnScales(torch.rand(COLUMNS)))
    weight = made((3,), reader)
    load(weight, (3,), 1)
    call = weight.bind({})
    x = torch.randn(2, COLUMNS)
    reader.values = ColumnScales(SCALES)
    stored = load(weight, (3,), 2)
    torch.testing.assert_close(call(x), (x * SCALES) @ stored.T, rtol=1e-5, atol=1e-4)
    reader.values = Hadamard(2)
    with pytest.raises(
        ModelError, match="m comes with another transform than it was first loaded with"
    ):
        load(weight, (3,), 3)


@pytest.mark.parametrize(
    ("readers", "spans"),
    [
        ((EightBits(),) * 6, [(0, 24)]),
        (
            (EightBits(), EightBits(), None, EightBits(), EightBits(), EightBits()),
            [(0, 8), (8, 11), (11, 16), (16, 24)],
        ),
        (
            (EightBits(), Turned(Hadamard(4))) * 3,
            [(0, 3), (3, 8), (8, 11), (11, 16), (16, 19), (19, 24)],
        ),
    ],
    ids=["one form", "one expert differs", "a transform each"],
)
def test_experts_are_cut_between_each_other(
    readers: tuple[Reader, ...], spans: list[tuple[int, int]]
) -> None:
    """Three experts of two parts each. Only if the forms differ, each expert has its own spans."""
    rows = (3, 5) * 3
    weight = made(rows, *readers, num_experts=3)
    load(weight, rows, 1)
    assert [(span.start, span.stop) for span in weight.spans] == spans
    matrices = weight.dequantize().view(3, 8, COLUMNS)
    bias = torch.randn(3, 8)
    x = torch.randn(7, COLUMNS)
    call = weight.bind_experts({}, 3, bias)
    found = call(x, torch.tensor([0, 2, 2, 7]))
    expected = torch.cat((x[:2] @ matrices[0].T + bias[0], x[2:] @ matrices[2].T + bias[2]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert weight.bind_experts({}, 3, None)(x[:0], torch.tensor([0, 0, 0, 0])).shape == (0, 8)
    memory = weight.expert_memory(3)
    assert (memory is None) == (len(spans) > 1), "only experts in one form can move"
    assert memory is None or len(memory.experts) == 3
