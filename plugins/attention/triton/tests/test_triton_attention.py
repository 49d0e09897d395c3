"""The kernels under Triton's interpreter, compared with plain torch."""

from __future__ import annotations

import pytest
import torch
from pegboard_attention_triton import attention, store

from pegboard_testing.attention_reference import paged_attention

pytestmark = [
    pytest.mark.usefixtures("interpreted_triton"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # where sigmoid is 0
]
TOLERANCES = {torch.float32: 3e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Step:
    """Rows of random queries and a cache in shuffled blocks. Unused slots hold large numbers."""

    def __init__(
        self,
        counts: list[int],
        lengths: list[int],
        heads: tuple[int, int],
        widths: tuple[int, int],
        block_size: int,
        dtype: torch.dtype = torch.float32,
        gap: int = 0,
    ) -> None:
        used = [-(-length // block_size) for length in lengths]
        order = torch.randperm(sum(used), dtype=torch.int32).add_(1).split(used)
        self.table = torch.zeros(len(lengths), max(used) + 1, dtype=torch.int32)
        for row, blocks in zip(self.table, order, strict=True):
            row[: len(blocks)] = blocks
        self.caches = []
        for width in widths:  # `gap`: bytes of other tensors between two blocks
            memory = (
                torch.randn(sum(used) + 1, block_size * heads[1] * width + gap).mul_(3).to(dtype)
            )
            self.caches.append(
                memory[:, : block_size * heads[1] * width].unflatten(
                    1, (block_size, heads[1], width)
                )
            )
        self.starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.q = torch.randn(sum(counts), heads[0] + 1, widths[0]).to(dtype)[:, 1:]

    def both(self, **features: object) -> tuple[torch.Tensor, torch.Tensor]:
        arguments = (
            self.q,
            *self.caches,
            self.table,
            self.starts,
            self.lengths,
            self.q.shape[-1] ** -0.5,
        )
        expected = paged_attention(*arguments, **features)  # type: ignore[arg-type]
        return attention.paged_attention(*arguments, **features), expected  # type: ignore[arg-type]

    def check(self, **features: object) -> None:
        found, expected = self.both(**features)
        allowed = TOLERANCES[found.dtype]
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found.float(), expected.float(), rtol=allowed, atol=allowed)


MIXED = ([1, 4, 0, 1, 19], [7, 9, 30, 1, 19])
"""(new tokens, length) of rows: a decode, a chunk that follows cached tokens, a row without new
tokens, a prompt of one token, and a whole prompt."""


FEATURES: list[dict[str, object]] = [
    {},
    {"window": 5},
    {"soft_cap": 2.0},
    {"window": 1, "soft_cap": 20.0},
    {"chunk": 5},
    {"sinks": torch.linspace(-2, 4, 6), "soft_cap": 2.0},
]


@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_a_mixed_step(features: dict[str, object]) -> None:
    Step(*MIXED, heads=(6, 2), widths=(24, 24), block_size=4).check(**features)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_dtype(dtype: torch.dtype) -> None:
    Step([1, 7], [40, 7], heads=(4, 1), widths=(64, 64), block_size=16, dtype=dtype).check()


def test_values_of_another_width_and_blocks_that_lie_apart() -> None:
    Step([3, 2], [10, 2], heads=(3, 3), widths=(17, 40), block_size=3, gap=11).check()


def test_a_prompt_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    small = attention.Tiles(tokens=5, queries=16, keys=16, splits=1, warps=4)
    monkeypatch.setattr(attention, "choose_tiles", lambda *shapes: small)
    step = Step([12, 1, 0, 6], [20, 33, 5, 6], heads=(3, 1), widths=(16, 16), block_size=8)
    step.check()
    step.check(window=9)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize(
    "features", [{}, {"window": 21}, {"chunk": 32, "sinks": torch.linspace(-2, 4, 5)}], ids=str
)
@pytest.mark.parametrize(
    ("tokens", "counts", "lengths"),
    [(1, [1, 1, 1], [70, 1, 33]), (3, [4, 1, 5, 2], [70, 1, 33, 40])],
    ids=["decodes", "drafts"],
)
def test_splits(
    monkeypatch: pytest.MonkeyPatch,
    splits: int,
    features: dict[str, object],
    tokens: int,
    counts: list[int],
    lengths: list[int],
) -> None:
    """Some rows are shorter than the number of splits."""
    small = attention.Tiles(tokens=tokens, queries=16, keys=16, splits=splits, warps=4)
    monkeypatch.setattr(attention, "choose_tiles", lambda *shapes: small)
    Step(counts, lengths, heads=(5, 1), widths=(24, 24), block_size=4).check(**features)


@pytest.mark.parametrize("splits", [1, 4])
def test_as_many_tokens_as_rows_need_not_be_decodes(
    monkeypatch: pytest.MonkeyPatch, splits: int
) -> None:
    small = attention.Tiles(tokens=1, queries=16, keys=16, splits=splits, warps=4)
    monkeypatch.setattr(attention, "choose_tiles", lambda *shapes: small)
    Step(
        [0, 3, 0, 1, 2, 0], [4, 30, 1, 9, 2, 8], heads=(2, 1), widths=(16, 16), block_size=4
    ).check()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("tokens", "counts", "extra_rows"),
    [(1, [1, 1], 2), (1, [2, 4], 0), (3, [1, 4], 0), (3, [3, 2], 1), (5, [2, 1, 7, 1], 3)],
)
def test_padding_gives_zeros(
    monkeypatch: pytest.MonkeyPatch,
    splits: int,
    tokens: int,
    counts: list[int],
    extra_rows: int,
) -> None:
    """Rows without tokens, and tokens that belong to no row."""
    small = attention.Tiles(tokens=tokens, queries=16, keys=16, splits=splits, warps=4)
    monkeypatch.setattr(attention, "choose_tiles", lambda *shapes: small)
    num_tokens = sum(counts)
    lengths = [30, 4, 9, 17][: len(counts)]
    step = Step(counts, lengths, heads=(2, 1), widths=(16, 16), block_size=4)
    _, expected = step.both()
    none = torch.zeros(extra_rows, dtype=torch.int32)
    step.q = torch.cat([step.q, step.q])
    step.starts = torch.cat([step.starts, none + num_tokens])
    step.lengths = torch.cat([step.lengths, none])
    step.table = torch.cat([step.table, torch.zeros_like(step.table)[:extra_rows]])
    found = attention.paged_attention(
        step.q, *step.caches, step.table, step.starts, step.lengths, 0.25
    )
    torch.testing.assert_close(found[:num_tokens], expected)
    assert not found[num_tokens:].any()


def test_a_step_without_tokens() -> None:
    found, _ = Step([0], [3], heads=(2, 1), widths=(16, 24), block_size=4).both()
    assert found.shape == (0, 2, 24)


@pytest.mark.parametrize(
    "num_tokens, num_rows", [(1, 1), (4, 1), (256, 256), (300, 7), (8192, 1), (2048, 256)]
)
@pytest.mark.parametrize("group", [1, 3, 8, 40])
@pytest.mark.parametrize("width, itemsize", [(64, 2), (128, 2), (80, 4), (256, 2), (256, 4)])
def test_tiles(num_tokens: int, num_rows: int, group: int, width: int, itemsize: int) -> None:
    tiles = attention.choose_tiles(num_tokens, num_rows, 8, group, width, itemsize, 8192, 132)
    assert tiles.tokens * group <= tiles.queries and tiles.tokens >= 1
    for value in (tiles.queries, tiles.keys, tiles.splits):
        assert value & (value - 1) == 0, "a power of two"
    assert tiles.splits == 1 or num_tokens <= 16 * num_rows
    assert tiles.keys * width * itemsize <= 2**15, (
        "keys and values of two loads fit in the shared memory of a multiprocessor"
    )


def test_short_rows_and_large_batches_are_not_split() -> None:
    assert attention.choose_tiles(1, 1, 8, 4, 128, 2, 8192, 132).splits == 32
    assert attention.choose_tiles(1, 1, 8, 4, 128, 2, 128, 132).splits == 1
    assert attention.choose_tiles(256, 256, 8, 4, 128, 2, 8192, 132).splits == 1


def test_a_row_with_drafts_is_one_tile_and_is_split_like_a_decode() -> None:
    decode = attention.choose_tiles(4, 4, 8, 4, 128, 2, 8192, 132)
    verify = attention.choose_tiles(16, 4, 8, 4, 128, 2, 8192, 132)
    assert (decode.tokens, verify.tokens) == (1, 4) and decode.splits == verify.splits == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_kv(dtype: torch.dtype) -> None:
    k = torch.randn(5, 4, 9)[:, 1:]
    v = torch.randn(5, 3, 6)
    slots = torch.tensor([13, -1, 0, 7, -1])
    found = [torch.randn(4, 4 * 3 * width + 2).to(dtype) for width in (9, 6)]
    expected = [memory.clone() for memory in found]
    store.store_kv(k, v, *(memory[:, :-2].unflatten(1, (4, 3, -1)) for memory in found), slots)
    for new, memory in ((k, expected[0]), (v, expected[1])):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                memory[:, :-2].unflatten(1, (4, 3, -1))[slot // 4, slot % 4] = new[token].to(dtype)
    # the interpreter cuts bits off, and a GPU rounds to the nearest number
    rounding = 2**-7 if dtype == torch.bfloat16 else 0
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=rounding, atol=0)


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_store_kv_rounds_to_the_nearest_8_bit_float(
    stored: torch.dtype, dtype: torch.dtype
) -> None:
    """It gives the same bits as torch for all codes, for what lies exactly between two codes, just
    beside that, and for any other number."""
    codes = torch.arange(256, dtype=torch.uint8).view(stored).float()
    codes = codes[codes.isfinite()].sort().values
    middles = (codes[1:] + codes[:-1]) / 2
    x = torch.cat(
        [
            codes,
            middles,
            middles * (1 + 2**-22),
            middles * (1 - 2**-22),
            torch.randn(300).mul(9).exp(),
            codes * 3,
        ]
    )
    x = torch.nn.functional.pad(x, (0, -len(x) % 4)).view(1, 4, -1).to(dtype)
    scales = torch.tensor([1.0, 0.5, 3.0, 1.0])
    k_cache, v_cache = torch.zeros(2, 1, 1, *x.shape[1:], dtype=stored)
    store.store_kv(x, -x, k_cache, v_cache, torch.tensor([0]), scales, scales.flip(0))
    largest = torch.finfo(stored).max
    for found, wide, scale in ((k_cache, x, scales), (v_cache, -x, scales.flip(0))):
        expected = (wide.float() / scale[:, None]).clamp(-largest, largest).to(stored)
        assert torch.equal(found.view(torch.uint8)[0], expected.view(torch.uint8))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_8_bit_float_is_read_exactly(stored: torch.dtype) -> None:
    """Attention to a single token returns its value."""
    codes = torch.arange(256, dtype=torch.uint8).view(stored)
    finite = codes[codes.float().isfinite()]
    v_cache = (
        torch.nn.functional.pad(finite.view(torch.uint8), (0, 256 - len(finite)))
        .view(stored)
        .view(1, 1, 1, 256)
    )
    one = torch.ones(1, dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    scale = torch.tensor([0.25])
    arguments = (
        torch.ones(1, 1, 16),
        torch.zeros(1, 1, 1, 16, dtype=stored),
        v_cache,
        table,
        starts,
        one,
        1.0,
    )
    found = attention.paged_attention(*arguments, k_scale=scale, v_scale=scale)
    assert torch.equal(found.view(-1)[: len(finite)], finite.float() / 4)
