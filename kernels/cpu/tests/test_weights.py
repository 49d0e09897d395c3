"""Matrices in packed layouts, compared with their references, in shapes that do not fill tiles
evenly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_kernel_cpu.block_weight import NativeBlockWeight
from pegboard_kernel_cpu.float_weight import TYPES, InvariantFloatWeight, NativeFloatWeight
from pegboard_kernel_cpu.library import library

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import RepackCache, RepackEntry
from pegboard.ops.blocks import Blocks, BlockWeight
from pegboard.ops.rounding import Rounding
from pegboard_testing.contract_float_weight import FloatWeightContract
from pegboard_testing.held_memory import held_bytes
from pegboard_testing.stored_rows import COLUMNS, FORMATS, HALF, blocks_of

pytestmark = pytest.mark.usefixtures("native")

SOME = settings(max_examples=12, deadline=None)


def quantized(x: torch.Tensor) -> torch.Tensor:
    """Return x with every 32 columns rounded to int8 times a scale, as in the kernels."""
    parts = x.view(x.shape[0], -1, 32)
    scale = parts.abs().amax(-1, keepdim=True) / 127
    return (torch.round(parts / scale.clamp_min(1e-30)) * scale).view_as(x)


def product_of(x: torch.Tensor, matrix: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return x Wᵀ as the kernels compute it, and the error that they may have, as a part of the
    largest result. Tiles round both factors to bfloat16: a number may be rounded up here and down
    there."""
    if len(x) >= library().constant("blocks_rounded_from"):
        return x.bfloat16().float() @ matrix.bfloat16().float().T, 1e-3
    return quantized(x) @ matrix.T, 1e-4


def activations(count: int, columns: int, seed: int) -> torch.Tensor:
    """Return random values with unambiguous int8 codes. None is near the middle between two codes,
    where rounding errors would decide."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, columns // 32, 32)
    codes = (
        torch.randint(-126, 127, shape, generator=generator)
        + torch.rand(shape, generator=generator) * 0.8
        - 0.4
    )
    codes[..., seed % 32] = 127
    scale = torch.rand((*shape[:2], 1), generator=generator) * 0.02 + 0.001
    return (codes * scale).view(count, columns)


formats = st.sampled_from(FORMATS)
tokens = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 11, 13, 24, 97, 130])


@SOME
@given(
    formats,
    formats,
    st.integers(1, 70),
    st.integers(1, 40),
    st.integers(1, 3),
    tokens,
    st.integers(0, 999),
)
def test_block_weights_multiply_what_the_blocks_mean(
    first: tuple, second: tuple, rows: int, more: int, width: int, count: int, seed: int
) -> None:
    shape = (rows + more, COLUMNS * width)
    weights = [kind(shape, torch.float32, "cpu") for kind in (NativeBlockWeight, BlockWeight)]
    for weight in weights:
        weight.write(0, blocks_of(first, rows, shape[1], seed))
        weight.write(rows, blocks_of(second, more, shape[1], seed + 1))
        weight.finish()
    native, reference = weights
    assert torch.allclose(native.dense(), reference.dense(), atol=1e-6)
    x = activations(count, shape[1], seed)
    expected, error = product_of(x, reference.dense())
    assert torch.allclose(
        native.bind()(x), expected, rtol=error, atol=error * float(expected.abs().max())
    )


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_every_format_with_few_and_many_tokens(form: tuple) -> None:
    columns = 3 * COLUMNS  # more than the tiles take at a time
    weight = NativeBlockWeight((40, columns), torch.float32, "cpu")
    blocks = blocks_of(form, 40, columns, 3)
    weight.write(0, blocks)
    weight.finish()
    assert torch.allclose(weight.dense(), blocks.dense(), atol=1e-6)
    for count in (1, 16, 53, 130):
        x = activations(count, columns, 3)
        expected, error = product_of(x, blocks.dense())
        assert torch.allclose(
            weight.bind()(x), expected, rtol=error, atol=error * float(expected.abs().max())
        )
    stored = [
        blocks.scale,
        blocks.minimum,
        blocks.zero if form[3] == "zeros" else None,
        blocks.outer,
    ]
    packed = 40 * columns * form[0] / 8 + sum(part.nbytes for part in stored if part is not None)
    assert held_bytes(weight) <= 48 / 40 * packed + 64, (
        "codes take their own bits, and scales are kept as they are stored"
    )


@SOME
@given(
    st.sampled_from([(8, COLUMNS, HALF, ""), (8, 64, HALF, "both"), (8, 32, torch.float32, "")]),
    st.sampled_from((0, 96)),
    st.sampled_from((None, 0.02)),
    st.integers(1, 70),
    tokens,
    st.integers(0, 999),
)
def test_activations_are_rounded_as_a_checkpoint_asks(
    form: tuple, group: int, scale: float | None, rows: int, count: int, seed: int
) -> None:
    """Scales per token, per group and given; weights with one scale per row, and with blocks. Many
    tokens are not multiplied in another way."""
    rounding = Rounding("int8", group, scale)
    weights = [
        kind((rows, COLUMNS), torch.float32, "cpu", rounding=rounding)
        for kind in (NativeBlockWeight, BlockWeight)
    ]
    for weight in weights:
        weight.write(0, blocks_of(form, rows, COLUMNS, seed))
        weight.finish()
    native, reference = weights
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-126, 127, (count, COLUMNS), generator=generator)
    codes[:, :: group or COLUMNS] = 127
    x = (codes + torch.rand(codes.shape, generator=generator) * 0.8 - 0.4) * (scale or 0.1)
    x[:, :: group or COLUMNS] = 127 * (scale or 0.1)
    assert torch.equal(rounding.quantize(x)[0].long(), codes), "no code is a matter of rounding"
    expected = reference.bind()(x)
    bound = 1e-5 * float((rounding.rounded(x).abs() @ reference.dense().abs().T).max())
    torch.testing.assert_close(native.bind()(x), expected, rtol=0, atol=bound)


def test_experts_round_what_they_multiply() -> None:
    rounding = Rounding("int8")
    weights = [
        kind((96, COLUMNS), torch.float32, "cpu", rounding=rounding)
        for kind in (NativeBlockWeight, BlockWeight)
    ]
    starts = torch.tensor([0, 2, 2, 50], dtype=torch.int32)
    x = torch.randint(-126, 127, (50, COLUMNS)).float()
    x[:, 0] = 127
    products = []
    for weight in weights:
        weight.write(0, blocks_of((8, COLUMNS, HALF, ""), 96, COLUMNS, 3))
        weight.finish()
        products.append(weight.bind_experts(3, None)(x, starts))
    assert torch.allclose(*products, rtol=0, atol=1e-5 * float(products[1].abs().max()) * 10)


def test_only_roundings_to_whole_parts_are_taken() -> None:
    taken = [Rounding("int8"), Rounding("int8", 64), Rounding("int8", 0, 0.1)]
    assert all(NativeBlockWeight.takes(each, False) for each in taken)
    others = [Rounding("int8", 48), Rounding("float8_e4m3fn")]
    assert not any(NativeBlockWeight.takes(each, False) for each in others)
    weight = NativeBlockWeight((16, COLUMNS), torch.float32, "cpu", rounding=taken[0])
    rows = blocks_of((8, COLUMNS, HALF, ""), 16, COLUMNS, 3)
    with pytest.raises(ModelError, match="another order"):
        weight.write(0, replace(rows, order=torch.randperm(COLUMNS)))


@SOME
@given(
    formats,
    st.integers(1, 60),
    st.integers(1, 2),
    st.lists(st.integers(0, 59), min_size=1, max_size=9),
)
def test_rows_of_a_table(form: tuple, rows: int, width: int, ids: list[int]) -> None:
    blocks = blocks_of(form, rows, COLUMNS * width, 5)
    table = NativeBlockWeight((60, COLUMNS * width), torch.float32, "cpu", is_table=True)
    table.write(0, blocks)
    table.finish()
    expected = torch.zeros(60, COLUMNS * width)
    expected[:rows] = blocks.dense()
    assert torch.allclose(table.bind_lookup()(torch.tensor(ids)), expected[ids], atol=1e-6)


@SOME
@given(formats, st.integers(1, 30), st.integers(1, 30), tokens, st.integers(0, 999))
def test_columns_in_another_order(form: tuple, rows: int, more: int, count: int, seed: int) -> None:
    """Two parts with the same order, and one whose columns are in order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(COLUMNS, generator=generator)
    parts = [
        replace(blocks_of(form, rows, COLUMNS, seed), order=order),
        replace(blocks_of(form, more, COLUMNS, 1), order=order.clone()),
    ]
    parts.append(blocks_of(form, 5, COLUMNS, 2))
    weight = NativeBlockWeight((rows + more + 5, COLUMNS), torch.float32, "cpu")
    start = 0
    for part in parts:
        weight.write(start, part)
        start += part.codes.shape[0]
    weight.finish()
    expected = torch.cat([part.dense() for part in parts])
    assert torch.allclose(weight.dense(), expected, atol=1e-6)
    x = activations(count, COLUMNS, seed)
    ordered = x[:, order.argsort()]
    natural = x  # each has unambiguous codes in the order that its part is quantized in
    for given_x, used in ((ordered, slice(0, rows + more)), (natural, slice(rows + more, None))):
        columns = order if used.start == 0 else torch.arange(len(order))
        product, error = product_of(given_x[:, columns], expected[used][:, columns])
        assert torch.allclose(
            weight.bind()(given_x)[:, used],
            product,
            rtol=error,
            atol=error * float(product.abs().max()),
        )


def test_a_reload_keeps_the_order_of_columns() -> None:
    order = torch.arange(COLUMNS).flip(0)
    blocks = blocks_of(FORMATS[0], 20, COLUMNS, 0)
    weight = NativeBlockWeight((20, COLUMNS), torch.float32, "cpu")
    weight.write(0, replace(blocks, order=order))
    weight.finish()
    weight.write(0, replace(blocks_of(FORMATS[0], 20, COLUMNS, 1), order=order.clone()))
    weight.finish()
    assert torch.allclose(
        weight.dense()[:, order], blocks_of(FORMATS[0], 20, COLUMNS, 1).dense(), atol=1e-6
    )
    with pytest.raises(ModelError, match="a reload must not change the order"):
        weight.write(0, replace(blocks, order=order.roll(1)))


def test_a_reload_keeps_the_format() -> None:
    """Scales in float16 fit where float32 was held. Anything else would be read as something
    else."""
    narrow = blocks_of((4, 32, HALF, "minimum"), 20, 64, 0)
    assert narrow.minimum is not None
    wide = replace(narrow, scale=narrow.scale.float(), minimum=narrow.minimum.float())
    for first, second in (
        (wide, narrow),
        (narrow, wide),
        (narrow, blocks_of((4, 32, HALF, "zeros"), 20, 64, 0)),
    ):
        weight = NativeBlockWeight((20, 64), torch.float32, "cpu")
        weight.write(0, first)
        weight.finish()
        weight.write(0, second)
        if first is wide:
            weight.finish()
            assert torch.allclose(weight.dense(), narrow.dense(), atol=1e-6)
        else:
            with pytest.raises(ModelError, match="a reload must not change the format"):
                weight.finish()


def test_a_zero_row_of_activations_gives_zeros() -> None:
    weight = NativeBlockWeight((20, 64), torch.float32, "cpu")
    weight.write(0, blocks_of(FORMATS[1], 20, 64, 0))
    weight.finish()
    assert weight.bind()(torch.zeros(3, 64)).abs().max() == 0


def test_a_reload_is_seen_by_what_was_bound() -> None:
    weight = NativeBlockWeight((20, 64), torch.float32, "cpu")
    x = torch.randn(4, 64)
    weight.write(0, blocks_of(FORMATS[1], 20, 64, 0))
    weight.finish()
    bound = weight.bind()
    weight.write(0, blocks_of(FORMATS[1], 20, 64, 1))
    weight.finish()
    assert torch.allclose(
        bound(x), quantized(x) @ blocks_of(FORMATS[1], 20, 64, 1).dense().T, atol=1e-4
    )


def test_columns_that_fill_no_block_are_refused() -> None:
    with pytest.raises(ModelError, match="multiple of 32 columns, not 48"):
        NativeBlockWeight((4, 48), torch.float32, "cpu")


@pytest.mark.parametrize(("bits", "block_size"), [(4, 8), (4, 48), (4, 128), (9, 32), (0, 32)])
def test_blocks_that_no_kernel_computes_are_refused(bits: int, block_size: int) -> None:
    weight = NativeBlockWeight((4, 96), torch.float32, "cpu")
    codes = torch.zeros(4, 96, dtype=torch.uint8)
    with pytest.raises(ModelError, match=f"blocks of {block_size} columns with {bits} bits"):
        weight.write(0, Blocks(bits, block_size, codes, torch.ones(4, 96 // block_size)))


def test_a_kept_layout_is_the_weight(tmp_path: Path) -> None:
    def entry() -> RepackEntry:  # as when the engine starts
        return RepackCache(tmp_path, "sha256:1", 1 << 20).entry("layers.0", {})

    x = torch.randn(7, COLUMNS)
    first = NativeBlockWeight((40, COLUMNS), torch.float32, "cpu", cache=entry())
    assert not first.restore()
    first.write(0, blocks_of(FORMATS[0], 17, COLUMNS, 0))
    first.write(17, blocks_of(FORMATS[-1], 23, COLUMNS, 1))
    first.finish()
    second = NativeBlockWeight((40, COLUMNS), torch.float32, "cpu", cache=entry())
    assert second.restore()
    assert torch.equal(first.bind()(x), second.bind()(x))
    assert torch.equal(first.dense(), second.dense())


class TestInvariantFloatWeight(FloatWeightContract):
    weight_class = InvariantFloatWeight
    is_invariant = True


class TestNativeFloatWeight(FloatWeightContract):
    weight_class = NativeFloatWeight

    def test_one_copy(self) -> None:
        values = torch.randn(64, 64)
        table = self.filled(values, is_table=True)
        table.bind()
        table.bind_lookup()
        assert held_bytes(table) == values.nbytes


@SOME
@given(
    st.sampled_from(TYPES),
    st.integers(1, 90),
    st.sampled_from([1, 7, 31, 64, 255, 256, 257, 600, 9000]),
    tokens,
)
def test_float_weights_multiply(dtype: torch.dtype, rows: int, columns: int, count: int) -> None:
    """A token's results are the same bits in a step of any size."""
    weight = NativeFloatWeight((rows, columns), dtype, "cpu")
    matrix = torch.randn(rows, columns).to(dtype)
    x = torch.randn(count, columns)
    weight.plain().copy_(matrix)
    weight.finish()
    assert torch.equal(weight.dense(), matrix)
    product = weight.bind()
    results = product(x)
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6
    error = (results.double() - x.double() @ matrix.double().T).abs()
    assert (error <= rounding * (x.abs() @ matrix.float().abs().T) + 1e-5).all()
    assert torch.equal(torch.cat([product(part) for part in x.split([1, count - 1])]), results)


def test_types_that_are_not_multiplied_are_refused() -> None:
    with pytest.raises(ValueError, match="not torch.float64"):
        NativeFloatWeight((4, 4), torch.float64, "cpu")
    with pytest.raises(ValueError, match="not torch.bfloat16"):
        NativeFloatWeight((4, 4), torch.bfloat16, "cpu", activations=torch.bfloat16)
