"""Packed weights under Triton's interpreter, compared with their references: every form of codes
and scales, merged parts, few and many tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pegboard_kernel_triton import packed_product
from pegboard_kernel_triton.packed_form import Form
from pegboard_kernel_triton.packed_product import Tiles
from pegboard_kernel_triton.packed_weight import TritonBlockWeight, TritonCodeWeight

from pegboard.errors import ModelError
from pegboard.ops.blocks import Blocks, BlockWeight
from pegboard.ops.float_codes import CodeWeight, FloatCodes
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.held_memory import held_bytes
from pegboard_testing.stored_rows import (
    BLOCKS,
    COLUMNS,
    FORMATS,
    SCALES,
    VALUES,
    blocks_of,
    codes_of,
)

pytestmark = pytest.mark.usefixtures("interpreted_triton")
SOME = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
dtypes = st.sampled_from(list(TOLERANCES))
tokens = st.sampled_from([1, 3, 17])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["block_weight", "code_weight"])
def test_contract(name: str) -> None:
    check_entry(installed_entry("kernel", f"{name}.triton"))


def filled(kind: type, columns: int, *parts: Any, padding: int = 0, **more: Any) -> Any:
    """Return a finished weight of these parts."""
    count = sum(len(part.codes) for part in parts) + padding
    weight = kind((count, columns), torch.float32, "cpu", **more)
    write(weight, parts)
    return weight


def write(weight: Any, parts: tuple[Any, ...]) -> None:
    start = 0
    for part in parts:
        weight.write(start, part)
        start += len(part.codes)
    weight.finish()


def check_products(weight: Any, reference: Any, x: torch.Tensor) -> None:
    """Products have the type of x and are added in float32."""
    matrix = reference.dense()
    torch.testing.assert_close(weight.dense(), matrix, rtol=1e-6, atol=1e-6)
    product = weight.bind()(x)
    assert product.dtype == x.dtype and product.shape == (len(x), len(matrix))
    bound = TOLERANCES[x.dtype] * float((x.float().abs() @ matrix.abs().T).max())
    torch.testing.assert_close(product.float(), x.float() @ matrix.T, rtol=0, atol=bound)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_every_form_of_integers(form: Any) -> None:
    blocks = blocks_of(form, 19, COLUMNS, 3)
    parts = [filled(kind, COLUMNS, blocks) for kind in (TritonBlockWeight, BlockWeight)]
    check_products(*parts, torch.randn(3, COLUMNS))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("scale", SCALES, ids=str)
def test_every_form_of_codes(values: str, scale: torch.dtype) -> None:
    for block in BLOCKS[:: 1 + len(values) % 2]:
        codes = codes_of(values, scale, block, 19, 96, 3)
        parts = [filled(kind, 96, codes) for kind in (TritonCodeWeight, CodeWeight)]
        check_products(*parts, torch.randn(3, 96))


@SOME
@given(
    st.sampled_from(FORMATS),
    st.sampled_from(FORMATS),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 3),
    st.booleans(),
    tokens,
    dtypes,
    st.integers(0, 99),
)
def test_merged_integers(
    first: Any,
    second: Any,
    rows: int,
    more: int,
    padding: int,
    is_ordered: bool,
    count: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Parts in different forms and orders of columns, and rows without weights."""
    torch.manual_seed(seed)
    parts = [blocks_of(first, rows, COLUMNS, seed), blocks_of(second, more, COLUMNS, seed + 1)]
    if is_ordered:
        parts[0] = replace(parts[0], order=torch.randperm(COLUMNS))
    weights = [
        filled(kind, COLUMNS, *parts, padding=padding) for kind in (TritonBlockWeight, BlockWeight)
    ]
    check_products(*weights, torch.randn(count, COLUMNS + 5)[:, :COLUMNS].to(dtype))


@SOME
@given(
    st.sampled_from(sorted(VALUES)),
    st.sampled_from(SCALES),
    st.sampled_from(BLOCKS),
    st.integers(1, 40),
    st.sampled_from([32, 288]),
    tokens,
    dtypes,
    st.integers(0, 99),
)
def test_merged_codes(
    values: str,
    scale: torch.dtype,
    block: tuple[int, int],
    rows: int,
    columns: int,
    count: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Two parts in the same form are held together, each with its own factor."""
    torch.manual_seed(seed)
    first = codes_of(values, scale, block, rows, columns, seed)
    parts = (first, replace(first, factor=0.3))
    weights = [filled(kind, columns, *parts) for kind in (TritonCodeWeight, CodeWeight)]
    check_products(*weights, torch.randn(count, columns).to(dtype))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tiles", [Tiles(16, 16, 16, 4, 1), Tiles(32, 16, 128, 4, 1)], ids=str)
def test_tiles_do_not_matter(tiles: Tiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are larger, smaller, and no multiple of a tile."""

    def choose(count: int, num_rows: int, columns: int, form: Form) -> Tiles:
        return tiles._replace(columns=form.words or tiles.columns)

    monkeypatch.setattr(packed_product, "choose_tiles", choose)
    for form in FORMATS[::7]:
        blocks = blocks_of(form, 19, COLUMNS, 3)
        parts = [filled(kind, COLUMNS, blocks) for kind in (TritonBlockWeight, BlockWeight)]
        check_products(*parts, torch.randn(33, COLUMNS))


def test_nan_of_e4m3() -> None:
    codes = codes_of("e4m3fn", torch.float32, (1, 32), 2, 32, 3)
    codes.codes[0, 0] = 0x7F
    weight = filled(TritonCodeWeight, 32, codes)
    product = weight.bind()(torch.ones(1, 32))
    assert product.isnan().tolist() == [[True, False]]


def test_a_table_is_looked_up() -> None:
    blocks = blocks_of((4, 32, torch.float16, "zeros"), 9, COLUMNS, 3)
    codes = codes_of("nf4", torch.float8_e4m3fn, (1, 16), 9, COLUMNS, 3)
    ids = torch.tensor([3, 8, 3, 10])
    for kind, rows in ((TritonBlockWeight, blocks), (TritonCodeWeight, codes)):
        table = filled(kind, COLUMNS, rows, padding=2, is_table=True)
        expected = torch.cat((rows.dense(), torch.zeros(2, COLUMNS)))[ids]
        torch.testing.assert_close(table.bind_lookup()(ids), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "rows",
    [
        blocks_of((4, 64, torch.float16, "zeros"), 512, 1152, 3),
        blocks_of((6, 16, torch.int8, ""), 512, 1152, 3),
        blocks_of((3, 32, torch.float16, "zeros"), 512, 1152, 3),
        codes_of("e4m3fn", torch.float32, (128, 128), 512, 1152, 3),
        codes_of("e2m1", torch.float8_e4m3fn, (1, 16), 512, 1152, 3),
    ],
    ids=["4 bits", "6 bits", "3 bits", "FP8", "NVFP4"],
)
def test_weights_stay_packed(rows: Blocks | FloatCodes) -> None:
    """Nothing but the codes, their scales and a float per row is held."""
    kind, bits = (
        (TritonBlockWeight, rows.bits)
        if isinstance(rows, Blocks)
        else (TritonCodeWeight, 8 if len(rows.values) > 16 else 4)
    )
    weight = filled(kind, 1152, rows)
    stored = [rows.scale] + [
        part
        for part in (getattr(rows, name, None) for name in ("zero", "minimum", "outer"))
        if isinstance(part, torch.Tensor)
    ]
    scales = sum(part.nbytes for part in stored)
    assert held_bytes(weight) <= 1.05 * (rows.codes.numel() * bits / 8 + scales)


def test_a_reload_writes_to_the_same_memory() -> None:
    first = blocks_of((4, 32, torch.float16, "zeros"), 9, COLUMNS, 3)
    second = blocks_of((4, 32, torch.float16, "zeros"), 9, COLUMNS, 4)
    weight = filled(TritonBlockWeight, COLUMNS, first)
    call = weight.bind()
    addresses = [tensor.data_ptr() for tensor in weight.tensors()]
    write(weight, (second,))
    assert [tensor.data_ptr() for tensor in weight.tensors()] == addresses
    x = torch.randn(2, COLUMNS)
    torch.testing.assert_close(call(x), x @ second.dense().T, rtol=1e-4, atol=1e-4)
    weight.write(0, blocks_of((8, 32, torch.float16, ""), 9, COLUMNS, 3))
    with pytest.raises(ModelError, match="must not change the format"):
        weight.finish()


def test_memory_of_experts() -> None:
    """The memory of one expert may be filled with that of another."""
    parts = [blocks_of((4, 32, torch.float16, "zeros"), 6, COLUMNS, seed) for seed in range(3)]
    weight = filled(TritonBlockWeight, COLUMNS, *parts)
    memory = weight.expert_memory(3)
    assert memory is not None
    for target, source in zip(memory.experts[0], memory.experts[2], strict=True):
        target.copy_(source)
    torch.testing.assert_close(weight.dense()[:6], parts[2].dense(), rtol=1e-6, atol=1e-6)
    mixed = filled(
        TritonBlockWeight, COLUMNS, *parts, blocks_of((8, 32, torch.float16, ""), 6, COLUMNS, 3)
    )
    assert mixed.expert_memory(4) is None


@SOME
@given(
    st.sampled_from(FORMATS),
    st.integers(1, 4),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(0, 40),
    st.booleans(),
    st.booleans(),
    dtypes,
    st.integers(0, 99),
)
def test_experts(
    form: Any,
    num_experts: int,
    rows: int,
    more: int,
    count: int,
    is_ordered: bool,
    has_bias: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Two parts of each expert, in orders of their own. Tokens after the last have no expert."""
    torch.manual_seed(seed)
    parts = [
        blocks_of(form, size, COLUMNS, seed + number)
        for number in range(num_experts)
        for size in (rows, more)
    ]
    if is_ordered:
        parts = [replace(part, order=torch.randperm(COLUMNS)) for part in parts]
    weights = [filled(kind, COLUMNS, *parts) for kind in (TritonBlockWeight, BlockWeight)]
    bias = torch.randn(num_experts, rows + more) if has_bias else None
    starts = torch.randint(0, count + 1, (num_experts + 1,)).sort().values.int()
    starts[0] = 0
    x = torch.randn(count, COLUMNS).to(dtype)
    found, expected = (weight.bind_experts(num_experts, bias) for weight in weights)
    products = found(x, starts)
    assert products.dtype == dtype
    bound = TOLERANCES[dtype] * float(weights[1].dense().abs().sum(1).max() * 3 + 3)
    torch.testing.assert_close(
        products.float(), expected(x.float(), starts), rtol=TOLERANCES[dtype], atol=bound
    )


def test_experts_of_codes() -> None:
    parts = [codes_of("e2m1", torch.float8_e8m0fnu, (1, 32), 9, 96, seed) for seed in range(3)]
    weights = [filled(kind, 96, *parts) for kind in (TritonCodeWeight, CodeWeight)]
    x = torch.randn(20, 96)
    starts = torch.tensor([0, 3, 3, 17], dtype=torch.int32)
    found, expected = (weight.bind_experts(3, None)(x, starts) for weight in weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_experts_in_different_forms() -> None:
    """They are multiplied one by one."""
    forms = [(4, 32, torch.float16, "zeros"), (8, 32, torch.float16, "")]
    parts = [blocks_of(form, 5, COLUMNS, seed) for seed in range(2) for form in forms]
    weights = [filled(kind, COLUMNS, *parts) for kind in (TritonBlockWeight, BlockWeight)]
    x = torch.randn(6, COLUMNS)
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    found, expected = (weight.bind_experts(2, None)(x, starts) for weight in weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
