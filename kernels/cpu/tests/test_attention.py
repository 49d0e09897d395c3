"""Compiled attention, compared with the contract's reference on every level and with teams of
several sizes."""

from __future__ import annotations

from ctypes import c_float, c_int8, sizeof
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pegboard_kernel_cpu import elementwise
from pegboard_kernel_cpu.attention import NativeAttention
from pegboard_kernel_cpu.attention_structs import Item
from pegboard_kernel_cpu.library import library
from pegboard_kernel_cpu.plugin import ATTENTION
from pegboard_kernel_cpu.replay import NativeReplay
from torch import Tensor

from pegboard.errors import CannotRecord, ModelError
from pegboard.interfaces.attention import AttentionLayer, AttentionSetup, KVCacheSpec
from pegboard.ops.rope import rope
from pegboard_testing.contract_attention import (
    AttentionContract,
    Piece,
    Trial,
    as_stored,
    random_steps,
    with_scales,
)
from pegboard_testing.contract_encoder import EncoderContract
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_invariant_attention import InvariantAttentionContract

pytestmark = pytest.mark.usefixtures("native")

TOLERANCES = {
    "float32": 3e-5,
    "bfloat16": 3e-5,
    "float16": 3e-5,
    "int8": 1e-4,
    "float8_e4m3fn": 3e-5,
    "float8_e5m2": 3e-5,
}
"""Caches are compared with the reference on values that are rounded as the cache stores them, see
`Stored.rounded`."""


@pytest.mark.sampled(3)
class TestNativeAttention(AttentionContract):
    spec = ATTENTION

    def rounding(self, stored: str) -> float | None:
        rounds = stored == "bfloat16" and library().level.endswith(("avx512_bf16", "amx"))
        return 0.05 if rounds else None

    def backend(self, setup: AttentionSetup) -> NativeAttention:
        return NativeAttention(None, setup)


class TestInvariantNativeAttention(InvariantAttentionContract):
    contract = TestNativeAttention()


class TestNativeEncoders(EncoderContract):
    spec = ATTENTION

    def backend(self, setup: AttentionSetup) -> NativeAttention:
        return NativeAttention(None, setup)


@dataclass
class Stored(AttentionContract):
    """The contract and the trials for a cache with another element type."""

    kv_dtype: str

    def backend(self, setup: AttentionSetup) -> NativeAttention:
        kv_dtype = self.kv_dtype

        class Backend(NativeAttention):
            @staticmethod
            def kv_spec(layer: AttentionLayer, dtype: str) -> KVCacheSpec:
                return NativeAttention.kv_spec(layer, kv_dtype)

        return Backend(None, setup)

    @property
    def tolerance(self) -> float:
        return TestNativeAttention().rounding(self.kv_dtype) or TOLERANCES[self.kv_dtype]

    def rounded(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """Return x [..., K, D] rounded as the cache stores it. scale: [K], of 8-bit floats."""
        if self.kv_dtype == "int8":
            largest = x.abs().amax(-1, keepdim=True)
            # 127 / largest would round twice
            inverse = torch.where(largest > 0, torch.tensor(127.0) / largest, 0)
            return torch.round(x * inverse) * (largest / 127)
        return as_stored(x, getattr(torch, self.kv_dtype), scale)

    def trial(
        self, layers: list[AttentionLayer], block_size: int, lengths: list[int], seed: int
    ) -> Trial:
        trial = Trial(self, with_scales(layers, self.kv_dtype, seed), block_size, lengths, seed)
        for index, (k, v) in trial.caches.items():
            layer = trial.layers[index]
            trial.caches[index] = (self.rounded(k, layer.k_scale), self.rounded(v, layer.v_scale))
        return trial

    def check_all(self, trial: Trial, steps: list[list[Piece]]) -> None:
        for pieces in steps:
            self.check(trial, pieces, trial.step(pieces), self.tolerance)


SINKS = torch.tensor([9.0, 0, 5, -3, 7, 8])
REACH = st.none() | st.integers(1, 300)


@st.composite
def layers_of_a_group(draw: st.DrawFn) -> list[AttentionLayer]:
    num_kv_heads = draw(st.integers(1, 3))
    group = draw(st.sampled_from([1, 2, 3, 4, 7, 50]))
    head_dim = draw(st.sampled_from([8, 16, 32, 40, 64, 80, 96, 128, 256]))
    num_heads = num_kv_heads * group
    features: dict[str, Any] = {
        **draw(
            st.sampled_from(["window", "chunk"]).flatmap(
                lambda name: st.fixed_dictionaries({name: REACH})
            )
        ),
        "soft_cap": draw(st.none() | st.floats(0.5, 50)),
        "sinks": torch.linspace(-2, 4, num_heads) if draw(st.booleans()) else None,
    }
    return [
        AttentionLayer(
            layer_index=i,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=(1 + i) * head_dim**-0.5,
            **features,
        )
        for i in range(draw(st.integers(1, 2)))
    ]


@pytest.mark.sampled(3)
@settings(max_examples=10)
@given(
    layers_of_a_group(),
    st.sampled_from(sorted(TOLERANCES)),
    st.sampled_from([16, 32, 48, 64, 256]),
    st.lists(st.integers(1, 400), min_size=1, max_size=4),
    st.integers(0, 2**20),
)
def test_random_layers_and_steps(
    layers: list[AttentionLayer], kv_dtype: str, block_size: int, lengths: list[int], seed: int
):
    contract = Stored(kv_dtype)
    contract.check_all(
        contract.trial(layers, block_size, lengths, seed),
        list(random_steps(np.random.default_rng(seed), lengths)),
    )


def _layer(**changes: Any) -> AttentionLayer:
    known: dict[str, Any] = {
        "layer_index": 0,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 64,
        "scale": 0.125,
    }
    return AttentionLayer(**(known | changes))


@pytest.mark.parametrize("kv_dtype", sorted(TOLERANCES))
@pytest.mark.parametrize(
    "features",
    [{}, {"window": 500}, {"chunk": 700}, {"sinks": SINKS}],
    ids=lambda own: "".join(own),
)
def test_a_long_history_is_split_and_merged_alike_every_time(
    kv_dtype: str, features: dict[str, Any]
) -> None:
    contract = Stored(kv_dtype)
    trial = contract.trial([_layer(**features)], 32, [1101, 40], 7)
    trial.step([Piece(0, 0, 1100), Piece(1, 0, 39)])
    last = [Piece(0, 1100, 1101), Piece(1, 39, 40)]
    outputs = [trial.step(last)[0] for _ in range(5)]
    contract.check(trial, last, {0: outputs[0]}, contract.tolerance)
    assert all(torch.equal(outputs[0], other) for other in outputs)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("window", [None, 13])
def test_slots_that_no_token_has_written_do_not_matter(kv_dtype: str, window: int | None) -> None:
    """They may hold what is not a number, from a request that failed."""
    contract = Stored(kv_dtype)
    lengths = [37, 16, 90]
    trial = contract.trial([_layer(window=window)], 16, lengths, 3)
    for view in trial.views[0].values():
        view.fill_(float("nan"))
    contract.check_all(trial, list(random_steps(np.random.default_rng(5), lengths)))


def _items(backend: NativeAttention) -> list[Item]:
    return list((Item * backend.current.num_items).from_address(backend.current.items))


@settings(max_examples=20)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3000)), min_size=1, max_size=6),
    st.none() | st.integers(1, 900),
    st.booleans(),
)
def test_every_key_in_sight_is_computed_once(
    rows: list[tuple[int, int]], reach: int | None, in_chunks: bool
) -> None:
    """Plan a step. Check that every item stays within the keys of its tokens and that items are
    sorted by work. rows: the number of new tokens of each row, and the number of tokens before
    them."""
    contract = Stored("float32")
    layer = _layer(**{"chunk" if in_chunks else "window": reach}, head_dim=8)
    trial = Trial(contract, [layer], 32, [new + known for new, known in rows], 0)
    trial.backend.plan(
        trial.inputs([Piece(row, known, known + new) for row, (new, known) in enumerate(rows)])
    )
    items = _items(trial.backend)
    assert [item.work for item in items] == sorted((item.work for item in items), reverse=True)
    assert trial.backend.current.num_items * sizeof(Item) <= trial.backend.items.nbytes
    for row, (new, known) in enumerate(rows):
        for token in {0, new - 1}:
            mine = [
                item
                for item in items
                if item.row == row and item.first <= token < item.first + item.count
            ]
            ranges = sorted((item.key_first, item.key_stop) for item in mine)
            position = known + token
            first = (
                0
                if reach is None
                else position // reach * reach
                if in_chunks
                else max(0, position + 1 - reach)
            )
            assert ranges[0][0] <= first and ranges[-1][1] > position
            assert all(
                before[1] == after[0] for before, after in zip(ranges, ranges[1:], strict=False)
            )
            assert all(item.num_splits == len(mine) for item in mine)
            assert {item.split for item in mine} == set(range(len(mine)))


@dataclass
class Sharing:
    """Rows of a few families. The rows of a family share their first blocks; each has its own
    remaining blocks."""

    contract: Stored
    layers: list[AttentionLayer]
    block_size: int
    prefixes: list[int]
    families: list[int]
    owned: list[int]
    seed: int

    def trial(self) -> Trial:
        size = self.block_size
        lengths = [
            self.prefixes[family] * size + own
            for family, own in zip(self.families, self.owned, strict=True)
        ]
        trial = Trial(
            self.contract,
            with_scales(self.layers, self.contract.kv_dtype, self.seed),
            size,
            lengths,
            self.seed,
        )
        for row, family in enumerate(self.families):
            first = self.families.index(family)
            count = self.prefixes[family]
            trial.tables[row][:count] = trial.tables[first][:count]
            for values in (*trial.k.values(), *trial.v.values()):
                values[row][: count * size] = values[first][: count * size]
        for index in trial.caches:
            layer = trial.layers[index]
            k, v = (trial._reference_cache(x[index]) for x in (trial.k, trial.v))
            trial.caches[index] = (
                self.contract.rounded(k, layer.k_scale),
                self.contract.rounded(v, layer.v_scale),
            )
        return trial

    def steps(self, num_last: list[int]) -> list[list[Piece]]:
        """Compute all tokens except the last of each row, with shared blocks only once. Then
        compute the last tokens of all rows together."""
        fill = []
        last = []
        for row, (family, own) in enumerate(zip(self.families, self.owned, strict=True)):
            known = (
                0 if self.families.index(family) == row else self.prefixes[family] * self.block_size
            )
            stop = self.prefixes[family] * self.block_size + own
            split = stop - min(own, num_last[row])
            fill += [Piece(row, known, split)] if split > known else []
            last.append(Piece(row, split, stop))
        return [*([piece] for piece in fill), last]


@pytest.mark.sampled(3)
@settings(max_examples=6)
@given(
    st.data(),
    layers_of_a_group(),
    st.sampled_from(sorted(TOLERANCES)),
    st.sampled_from([16, 32, 48]),
    st.integers(0, 2**20),
)
def test_rows_after_the_same_blocks(
    data: st.DataObject, layers: list[AttentionLayer], kv_dtype: str, block_size: int, seed: int
) -> None:
    prefixes = data.draw(st.lists(st.integers(0, 600 // block_size), min_size=1, max_size=3))
    families = data.draw(st.lists(st.integers(0, len(prefixes) - 1), min_size=2, max_size=12))
    owned = [data.draw(st.integers(1, 100)) for _ in families]
    num_last = [data.draw(st.sampled_from([1, 1, 1, 3])) for _ in families]
    sharing = Sharing(Stored(kv_dtype), layers, block_size, prefixes, families, owned, seed)
    sharing.contract.check_all(sharing.trial(), sharing.steps(num_last))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_rows", [2, 16, 17, 90, 700])
def test_shared_blocks_are_read_once_a_tile(num_rows: int) -> None:
    """For any number of rows, every row sees each key once, and the room for partial results is
    never exceeded."""
    sharing = Sharing(
        Stored("float32"), [_layer(head_dim=8)], 32, [20], [0] * num_rows, [5] * num_rows, 1
    )
    trial = sharing.trial()
    trial.backend.plan(trial.inputs([Piece(row, 644, 645) for row in range(num_rows)]))
    items = _items(trial.backend)
    members = trial.backend.members
    seen: dict[int, list[tuple[int, int]]] = {row: [] for row in range(num_rows)}
    for item in items:
        shared = item.num_members and item.member < 0
        for row in (
            members[item.members : item.members + item.num_members].tolist()
            if shared
            else [item.row]
        ):
            seen[row].append((item.key_first, item.key_stop))
    for ranges in map(sorted, seen.values()):
        assert ranges[0][0] == 0 and ranges[-1][1] == 645
        assert all(before[1] == after[0] for before, after in zip(ranges, ranges[1:], strict=False))
    assert any(item.num_members for item in items)
    assert (
        max(item.partial + item.num_splits for item in items if item.num_splits > 1)
        <= trial.backend.most_pieces
    )
    assert (
        len({(item.partial, item.merge) for item in items if item.num_splits > 1})
        <= trial.backend.most_pieces
    )
    assert len(items) * sizeof(Item) <= trial.backend.items.nbytes
    if num_rows <= 17:
        sharing.contract.check_all(trial, sharing.steps([1] * num_rows))


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_what_an_8_bit_float_cannot_hold_becomes_its_largest_number(kv_dtype: str) -> None:
    trial = Stored(kv_dtype).trial([_layer()], 16, [1], 0)
    values = (
        torch.tensor([1e7, -1e7, 0.0, 2.0**-20, 1.0, -3.3, 447.0, 1e-3]).repeat(8).expand(1, 2, 64)
    )
    trial.v[0] = [values]
    # attention to one token returns its values
    found = trial.step([Piece(0, 0, 1)])[0].view(2, 3, 64)
    expected = Stored(kv_dtype).rounded(values, trial.layers[0].v_scale)
    torch.testing.assert_close(found, expected.view(2, 1, 64).expand(2, 3, 64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
def test_what_lies_in_unused_slots_does_not_matter(kv_dtype: str) -> None:
    contract = Stored(kv_dtype)
    trial = contract.trial([_layer(window=33, head_dim=40)], 16, [50, 17], 3)
    for view in (view for named in trial.views.values() for view in named.values()):
        view.fill_(float("nan"))
    contract.check_all(
        trial, [[Piece(0, 0, 30), Piece(1, 0, 17)], [Piece(0, 30, 31)], [Piece(0, 31, 50)]]
    )


@settings(max_examples=20)
@given(st.booleans(), st.sampled_from([4, 12, 20, 32]), st.integers(1, 70), st.integers(0, 2**20))
def test_rotation(pairs: bool, rotary_pairs: int, num_tokens: int, seed: int) -> None:
    """Queries are rotated in place, and keys on their way into the cache; channels after the rotary
    ones stay as they are."""
    contract = Stored("float32")
    trial = contract.trial([_layer()], 32, [num_tokens], seed)
    backend = trial.backend
    call = trial.calls[0]
    q, k, v = (x[0][0] for x in (trial.q, trial.k, trial.v))
    angles = torch.randn(num_tokens, rotary_pairs)
    cos = angles.cos()
    sin = angles.sin()
    trial.q[0] = [rope(q, cos, sin, pairs)]
    trial.k[0] = [rope(k, cos, sin, pairs)]
    trial.caches[0] = (trial._reference_cache(trial.k[0]), trial.caches[0][1])
    piece = [Piece(0, 0, num_tokens)]
    backend.plan(trial.inputs(piece))
    qkv = torch.cat([x.flatten(1) for x in (q, k, v)], 1)
    positions = torch.arange(num_tokens)

    def run(qkv: Tensor, positions: Tensor) -> tuple[Tensor]:
        heads = qkv.view(num_tokens, 10, 64)
        turned = [
            elementwise.rope(x, cos[positions], sin[positions], pairs)
            for x in (heads[:, :6], heads[:, 6:8])
        ]
        return (call(*turned, heads[:, 8:]),)

    def same_rotation(qkv: Tensor, positions: Tensor) -> tuple[Tensor]:
        heads = qkv.view(num_tokens, 10, 64)
        rotation = (cos[positions], sin[positions])
        return (
            call(
                *(elementwise.rope(x, *rotation, pairs) for x in (heads[:, :6], heads[:, 6:8])),
                heads[:, 8:],
            ),
        )

    recording = NativeReplay().record(same_rotation, [qkv, positions])
    contract.check(trial, piece, {0: recording(num_tokens)[0]})
    with pytest.raises(CannotRecord, match="rotates queries and keys in different ways"):
        NativeReplay().record(run, [qkv, positions])


def test_queries_that_were_rotated_in_place_cannot_be_read_again() -> None:
    trial = Stored("float32").trial([_layer()], 32, [8], 5)
    cos = torch.randn(8, 8).cos()
    sin = torch.randn(8, 8).sin()

    def run(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        rotation = cos[positions], sin[positions]
        out = trial.calls[0](
            elementwise.rope(q, *rotation, False), elementwise.rope(k, *rotation, False), v
        )
        return out, elementwise.rms_norm(q, torch.ones(64), 1e-5).flatten(1)

    inputs = [x[0][0].clone() for x in (trial.q, trial.k, trial.v)]
    with pytest.raises(
        CannotRecord, match="run passes channels that were rotated in place to rms_norm"
    ):
        NativeReplay().record(run, [*inputs, torch.arange(8)])


def test_a_recorded_layer_that_reads_anothers_cache_stores_nothing() -> None:
    contract = Stored("float32")
    trial = contract.trial([_layer(), _layer(layer_index=1, shares_kv_with=0)], 32, [20], 5)
    piece = [Piece(0, 0, 20)]
    trial.step(piece)
    q = trial.q[1][0].clone()
    recording = NativeReplay().record(lambda q: (trial.calls[1](q, None, None),), [q])
    assert [call.kernel for call in recording.calls] == ["attend"]
    found = recording(20)[0].clone()
    torch.testing.assert_close(found, trial.step(piece)[1], atol=0, rtol=0)


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "fused"), [(8, 40, True), (6, 64, True), (6, 16, False)]
)
def test_the_result_is_quantized_where_blocks_fit_the_heads(
    num_heads: int, head_dim: int, fused: bool
) -> None:
    """The heads of a group have 160, 192 or 48 channels together. With 48, a block of 32 would
    overlap two groups."""
    trial = Stored("float32").trial(
        [_layer(num_heads=num_heads, head_dim=head_dim)], 32, [700, 3], head_dim
    )
    trial.step([Piece(0, 0, 699)])
    pieces = [Piece(0, 699, 700), Piece(1, 0, 3)]
    expected = trial.step(pieces)[0]
    q = torch.cat([trial.q[0][0][699:], trial.q[0][1]])
    columns = num_heads * head_dim
    made: list[Any] = []

    def run(q: Any) -> tuple[Any]:
        out = trial.calls[0](q, None, None)
        made.extend(out.recorder.quantized(out))
        return (out,)

    recording = NativeReplay().record(run, [q])
    assert [call.kernel for call in recording.calls] == (
        ["attend"] if fused else ["attend", "quantize"]
    )
    torch.testing.assert_close(recording(4)[0], expected, atol=0, rtol=0)
    last = recording.calls[-1].arguments.to
    codes = np.ctypeslib.as_array((c_int8 * (4 * columns)).from_address(last.codes))
    scales = np.ctypeslib.as_array((c_float * (4 * columns // 32)).from_address(last.scales))
    blocks = expected.numpy().reshape(-1, 32)
    np.testing.assert_allclose(scales, np.abs(blocks).max(1) / 127, rtol=1e-6)
    np.testing.assert_allclose(
        codes.reshape(-1, 32) * scales[:, None], blocks, atol=0.501 * scales.max()
    )


def test_values_of_another_size_are_refused_with_a_way_out() -> None:
    with pytest.raises(ModelError, match="cpu_paged"):
        NativeAttention.kv_spec(_layer(value_dim=32), "float32")


def test_entry() -> None:
    check_entry(installed_entry("attention", "cpu_native"))
