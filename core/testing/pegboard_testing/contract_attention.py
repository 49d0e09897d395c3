"""Contract tests of the kind `attention`. A plugin's test file:

    class TestMyBackend(AttentionContract):
        spec = MY_BACKEND

        def backend(self, setup: AttentionSetup) -> AttentionBackend:
            return MyBackend(None, setup)

Every declared capability is exercised on random steps and compared with `paged_attention`.
Selection must refuse every other capability. Only the backend reads and writes the cache, so it may
use any layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from torch import Tensor

from pegboard.interfaces.attention import (
    AttentionBackend,
    AttentionInputs,
    AttentionLayer,
    AttentionSetup,
    AttentionSpec,
    Chunk,
    Full,
    KVGroup,
    KVPlan,
    Window,
)
from pegboard.interfaces.spec import Multiple, unmet
from pegboard.worker import memory
from pegboard.worker.buffers import Buffer
from pegboard.worker.cross_inputs import CrossInputs
from pegboard_testing.attention_reference import FLOAT8, nearest, paged_attention
from pegboard_testing.fake_limits import fake_limits
from pegboard_testing.key_parts import Share, joined

FEATURES = ("window", "chunk", "sinks", "soft_cap", "part", "items", "distance_bias")
TOLERANCES = {"float32": 3e-5, "float16": 4e-3, "bfloat16": 3e-2}
STORED = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
"""Types of the cache that only round. Others (int8 with scales) are for the backend's own tests."""


@dataclass(frozen=True)
class Piece:
    """Tokens start … stop − 1 of a row, which are computed in one step."""

    row: int
    start: int
    stop: int


def with_scales(
    layers: Sequence[AttentionLayer], dtype: str | None, seed: int, device: str = "cpu"
) -> tuple[AttentionLayer, ...]:
    """Return the layers as core hands them over for a cache of this type: with a scale per KV head
    for 8-bit floats. The scales are between 1/16 and 16, and layers that share a cache have the
    same."""
    if dtype is None or not dtype.startswith("float8"):
        return tuple(layers)
    scaled = {}
    for layer in layers:
        owner = layer.layer_index if layer.shares_kv_with is None else layer.shares_kv_with
        scales = (
            torch.rand(2, layer.num_kv_heads, generator=torch.Generator().manual_seed(seed + owner))
            .mul(8)
            .sub(4)
            .exp2()
            .to(device)
        )
        scaled[layer.layer_index] = replace(layer, k_scale=scales[0], v_scale=scales[1])
    return tuple(scaled.values())


def as_stored(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    """Return x [..., K, D] as a cache of this type gives it back. scale: [K], of 8-bit floats."""
    if scale is None:
        return x.to(dtype).to(x.dtype)
    wide = x.float() / scale.unsqueeze(-1)
    largest = torch.finfo(dtype).max  # larger numbers would become NaN or infinity
    return (wide.clamp(-largest, largest).to(dtype).float() * scale.unsqueeze(-1)).to(x.dtype)


class Tested(Protocol):
    """A contract: the device, and a function that returns a new backend."""

    device: str

    def backend(self, setup: AttentionSetup) -> AttentionBackend: ...


class Trial:
    """A backend whose new cache contains garbage, rows of random queries, keys and values in
    shuffled blocks, and the same data in plain tensors for the reference. stored: the type of the
    cache, which holds all keys and values exactly; None = dtype. items: of each row, the first
    positions of its items and those after their ends. is_invariant: the backend is built for batch
    invariance."""

    is_invariant = False

    def __init__(
        self,
        contract: Tested,
        layers: Sequence[AttentionLayer],
        block_size: int,
        lengths: Sequence[int],
        seed: int,
        dtype: str = "float32",
        stored: str | None = None,
        items: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        self.items = items or [()] * len(lengths)
        self.layers = with_scales(layers, stored, seed, contract.device)
        self.block_size = block_size
        self.lengths = lengths
        self.device = contract.device
        random = torch.Generator().manual_seed(seed)
        kind = getattr(torch, dtype)

        def values(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random).to(kind).to(self.device)

        def storable(scale: Tensor | None, *shape: int) -> Tensor:
            return as_stored(
                values(*shape), getattr(torch, stored or dtype), scale if stored else None
            )

        blocks_of = [-(-length // block_size) for length in lengths]
        # block 0 belongs to no row, and two other blocks stay free
        self.num_blocks = 1 + sum(blocks_of) + 2
        shuffled = (
            torch.randperm(self.num_blocks - 1, generator=random).add_(1).split([*blocks_of, 2])
        )
        self.tables = [table.to(torch.int32) for table in shuffled[:-1]]
        self.q = {}
        self.k = {}
        self.v = {}
        self.caches = {}
        for layer in self.layers:
            index = layer.layer_index
            width = layer.value_dim or layer.head_dim
            self.q[index] = [values(n, layer.num_heads, layer.head_dim) for n in lengths]
            if layer.shares_kv_with is None:
                self.k[index] = [
                    storable(layer.k_scale, n, layer.num_kv_heads, layer.head_dim) for n in lengths
                ]
                self.v[index] = [
                    storable(layer.v_scale, n, layer.num_kv_heads, width) for n in lengths
                ]
                self.caches[index] = (
                    self._reference_cache(self.k[index]),
                    self._reference_cache(self.v[index]),
                )
        setup = AttentionSetup(
            self.layers,
            dtype,
            self.device,
            fake_limits(
                max_num_batched_tokens=sum(lengths),
                max_num_seqs=len(lengths),
                max_model_len=max(lengths),
            ),
            torch.get_num_threads(),
            batch_invariant=self.is_invariant,
        )
        self.backend = contract.backend(setup)
        owners = [layer for layer in self.layers if layer.shares_kv_with is None]
        spec = self.backend.kv_spec(owners[0], stored or dtype)
        group = KVGroup(tuple(layer.layer_index for layer in owners), spec, block_size)
        plan = KVPlan(
            (group,), self.num_blocks, spec.slot_bytes() * block_size * len(owners), block_size
        )
        self.views = memory.allocate(plan, self._zeros)
        for view in (view for named in self.views.values() for view in named.values()):
            view.copy_(torch.randn(view.shape, generator=random).mul_(9).to(view.dtype))
        self.backend.attach(self.views, block_size)
        self.calls = {layer.layer_index: self.backend.bind(layer) for layer in self.layers}

    def _zeros(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def _reference_cache(self, rows: Sequence[Tensor]) -> Tensor:
        cache = torch.zeros(
            self.num_blocks,
            self.block_size,
            *rows[0].shape[1:],
            dtype=rows[0].dtype,
            device=self.device,
        )
        for row, table in zip(rows, self.tables, strict=True):
            for index, block in enumerate(table.tolist()):
                part = row[index * self.block_size : (index + 1) * self.block_size]
                cache[block, : len(part)] = part
        return cache

    def inputs(
        self, pieces: Sequence[Piece], unstored: frozenset[int] = frozenset()
    ) -> AttentionInputs:
        """Return the step as the worker would describe it. All slots of rows in `unstored` are
        −1."""
        counts = [piece.stop - piece.start for piece in pieces]
        loc = np.cumsum([0, *counts]).astype(np.int32)
        seq_lens = np.array([piece.stop for piece in pieces], np.int32)
        tables = np.zeros((len(pieces), -(-int(seq_lens.max()) // self.block_size)), np.int32)
        slots = []
        for index, piece in enumerate(pieces):
            table = self.tables[piece.row]
            where = torch.arange(piece.start, piece.stop)
            used = -(-piece.stop // self.block_size)
            tables[index, :used] = table[:used]
            tables[index, : self._dropped(piece)] = 0
            places = (
                table[where // self.block_size].long() * self.block_size + where % self.block_size
            )
            slots.append(torch.full_like(places, -1) if piece.row in unstored else places)
        num_keys = self.num_keys(pieces)
        return AttentionInputs(
            num_rows=len(pieces),
            num_tokens=int(loc[-1]),
            query_start_loc=torch.from_numpy(loc).to(self.device),
            query_start_loc_cpu=loc,
            seq_lens=torch.from_numpy(seq_lens).to(self.device),
            seq_lens_cpu=seq_lens,
            block_table=torch.from_numpy(tables).to(self.device),
            block_table_cpu=tables,
            slot_mapping=torch.cat(slots).to(self.device),
            num_keys=None if num_keys is None else torch.from_numpy(num_keys).to(self.device),
            num_keys_cpu=num_keys,
        )

    def num_keys(self, pieces: Sequence[Piece]) -> np.ndarray | None:
        """Return how many keys each token of the step attends to, if one attends to later ones."""
        causal = [np.arange(piece.start, piece.stop, dtype=np.int32) + 1 for piece in pieces]
        seen = [each.copy() for each in causal]
        for piece, each in zip(pieces, seen, strict=True):
            for start, stop in self.items[piece.row]:
                each[max(start - piece.start, 0) : max(stop - piece.start, 0)] = stop
        whole = np.concatenate(seen)
        return whole if bool((whole > np.concatenate(causal)).any()) else None

    def _dropped(self, piece: Piece) -> int:
        """Return how many blocks at the start of the row no window or chunk reaches any more. The
        engine has already given them to other rows."""
        firsts = [
            0 if layer.chunk is None else piece.start // layer.chunk * layer.chunk
            for layer in self.layers
        ]
        firsts = [
            first if layer.window is None else max(first, piece.start - layer.window + 1)
            for first, layer in zip(firsts, self.layers, strict=True)
        ]
        return min(firsts) // self.block_size

    def step(
        self, pieces: Sequence[Piece], unstored: frozenset[int] = frozenset()
    ) -> dict[int, Tensor]:
        """Run one step through the backend and return the output [T, H · Dv] of each layer."""
        self.backend.plan(self.inputs(pieces, unstored))
        outputs = {}
        for layer in self.layers:
            index = layer.layer_index
            q = torch.cat([self.q[index][p.row][p.start : p.stop] for p in pieces])
            k = (
                torch.cat([self.k[index][p.row][p.start : p.stop] for p in pieces])
                if index in self.k
                else None
            )
            v = (
                torch.cat([self.v[index][p.row][p.start : p.stop] for p in pieces])
                if index in self.v
                else None
            )
            outputs[index] = self.calls[index](q, k, v)
        return outputs

    def expected(self, pieces: Sequence[Piece]) -> dict[int, Tensor]:
        """Return the same, computed by `paged_attention` in float32."""
        inputs = self.inputs(pieces)
        outputs = {}
        tables = torch.stack(
            [torch.nn.functional.pad(t, (0, self.num_blocks - len(t))) for t in self.tables]
        )
        tables = tables[[piece.row for piece in pieces]].to(self.device)
        for layer in self.layers:
            owner = layer.layer_index if layer.shares_kv_with is None else layer.shares_kv_with
            q = torch.cat(
                [self.q[layer.layer_index][p.row][p.start : p.stop] for p in pieces]
            ).float()
            rows = (tables, inputs.query_start_loc, inputs.seq_lens)
            features = (layer.window, layer.soft_cap, layer.chunk)
            out = paged_attention(
                q, *self.caches[owner], *rows, layer.scale, *features, layer.sinks, inputs.num_keys
            )
            outputs[layer.layer_index] = out.flatten(1)
        return outputs


class PartTrial(Trial):
    """A trial of a rank that has a share of the tokens."""

    def __init__(self, share: Share, contract: Tested, *args: Any) -> None:
        super().__init__(contract, *args)
        self.share = share

    def inputs(
        self, pieces: Sequence[Piece], unstored: frozenset[int] = frozenset()
    ) -> AttentionInputs:
        return self.share.of(super().inputs(pieces, unstored), self.block_size)


def random_items(rng: np.random.Generator, length: int) -> list[tuple[int, int]]:
    """Return where the items of a row are."""
    ends = sorted(rng.integers(0, length + 1, 2 * int(rng.integers(0, 4))).tolist())
    return [(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=True)]


def random_steps(
    rng: np.random.Generator,
    lengths: Sequence[int],
    items: Sequence[Sequence[tuple[int, int]]] | None = None,
) -> Iterator[list[Piece]]:
    """Yield steps that compute every row from its first to its last token, in chunks of random
    size. Each step takes some of the rows, decodes first. items: a chunk does not end inside
    these."""
    items = items or [()] * len(lengths)
    done = [0] * len(lengths)
    while left := [row for row, length in enumerate(lengths) if done[row] < length]:
        taken = [row for row in left if rng.random() < 0.7] or left[:1]
        pieces = []
        for row in taken:
            room = lengths[row] - done[row]
            count = int(rng.choice([1, room, int(rng.integers(1, room + 1))]))
            stop = done[row] + count
            stop = max([stop, *(end for start, end in items[row] if start < stop < end)])
            pieces.append(Piece(row, done[row], stop))
            done[row] = stop
        yield sorted(pieces, key=lambda piece: piece.stop - piece.start > 1)


class AttentionContract:
    """Every attention backend passes these. Override `spec` and `backend`, and `device` if it does
    not run on the CPU. long_row: tokens of a row that is long enough to be cut into ranges."""

    spec: AttentionSpec
    device = "cpu"
    long_row = 800

    def backend(self, setup: AttentionSetup) -> AttentionBackend:
        """Return a new backend."""
        raise AssertionError("override AttentionContract.backend")

    def rounding(self, stored: str) -> float | None:
        """Return the largest error, if products with this type of the cache round queries and
        weights."""
        return None

    @property
    def usual(self) -> str:
        """The type that most tests compute in: the most exact one that is declared."""
        return str(self.some("dtype", list(TOLERANCES))[0])

    def can(self, feature: str, value: object = True) -> bool:
        return not unmet(self.spec.supports, {feature: value})

    def some(self, feature: str, usual: Sequence[Any]) -> list[Any]:
        """Return the usual values that the backend declares, or the smallest value that it declares
        if it declares none of these."""
        fitting: list[Any] = [value for value in usual if self.can(feature, value)]
        declared: Any = self.spec.supports.get(feature)
        return fitting or [declared.of if isinstance(declared, Multiple) else min(declared)]

    def random_layers(self, rng: np.random.Generator) -> list[AttentionLayer]:
        """Make two layers of one KV group, with a random set of the declared features."""
        num_kv_heads = int(rng.integers(1, 4))
        group = int(rng.choice([1, 2, 3, 5]))
        num_heads = num_kv_heads * group
        head_dim = int(rng.choice(self.some("head_dim", [8, 16, 40, 64, 128])))
        features: dict[str, Any] = {}
        if self.can("window") and rng.random() < 0.4:
            features["window"] = int(rng.choice([1, 2, 5, 16, 33, 200]))
        if self.can("soft_cap") and rng.random() < 0.3:
            features["soft_cap"] = float(rng.choice([0.5, 2.0, 30.0]))
        if "window" not in features and self.can("chunk") and rng.random() < 0.4:
            features["chunk"] = int(rng.choice([1, 2, 5, 16, 33, 200]))
        if self.can("sinks") and rng.random() < 0.4:
            sinks = rng.normal(1, 3, num_heads).astype(np.float32)
            features["sinks"] = torch.from_numpy(sinks).to(self.device)
        return [
            AttentionLayer(
                layer_index=i,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5 * (1 + i),
                **features,
            )
            for i in range(2)
        ]

    def random_trial(
        self, seed: int, dtype: str | None = None, stored: str | None = None
    ) -> tuple[Trial, list[list[Piece]]]:
        dtype = dtype or self.usual
        rng = np.random.default_rng(seed)
        block_size = int(rng.choice(self.some("block_size", [1, 4, 16, 32])))
        lengths = [
            int(rng.choice([1, int(rng.integers(1, 12)), int(rng.integers(1, 90))]))
            for _ in range(rng.integers(1, 7))
        ]
        trial = Trial(self, self.random_layers(rng), block_size, lengths, seed, dtype, stored)
        return trial, list(random_steps(rng, lengths))

    @pytest.mark.parametrize("seed", range(24))
    def test_random_steps_equal_the_reference(self, seed: int) -> None:
        """Prefill, chunked prefill and decode, alone and mixed. Each step reads what earlier steps
        wrote."""
        trial, steps = self.random_trial(seed)
        for pieces in steps:
            self.check(trial, pieces, trial.step(pieces))

    @pytest.mark.parametrize("seed", range(24))
    def test_items_are_seen_to_their_end(self, seed: int) -> None:
        """Rows with items, chunks of them, and decodes. Windows and chunks of attention decide
        which key is the first one. Sometimes ranks share out the tokens."""
        if not self.can("items"):
            return
        rng = np.random.default_rng(900 + seed)
        layers = [replace(layer, sees_items=True) for layer in self.random_layers(rng)]
        lengths = [
            1,
            int(rng.integers(2, 90)),
            int(rng.integers(2, self.long_row if seed % 6 == 0 else 200)),
            int(rng.integers(2, 40)),
        ]
        items = [random_items(rng, length) for length in lengths]
        stored = self.some("kv_dtype", [*TOLERANCES, "float8_e4m3fn"])
        block_size = self.some("block_size", [4, 16])[0]
        rest = (block_size, lengths, seed, self.usual, stored[seed % len(stored)], items)
        if seed % 3 or not self.can("part"):
            trial = Trial(self, layers, *rest)
            for pieces in random_steps(rng, lengths, items):
                self.check(trial, pieces, trial.step(pieces), self.rounding(rest[4]))
        else:
            layers = [replace(layer, window=None, chunk=None, sinks=None) for layer in layers]
            self.check_parts(layers, Share(0, 3, 2), rest, random_steps(rng, lengths, items))

    @pytest.mark.parametrize("dtype", TOLERANCES)
    def test_every_declared_dtype(self, dtype: str) -> None:
        if not (self.can("dtype", dtype) and self.can("kv_dtype", dtype)):
            return
        trial, steps = self.random_trial(100, dtype)
        for pieces in steps:
            outputs = trial.step(pieces)
            assert all(out.dtype == getattr(torch, dtype) for out in outputs.values())
            self.check(trial, pieces, outputs, TOLERANCES[dtype])

    @pytest.mark.parametrize("stored", STORED)
    def test_every_declared_type_of_the_cache(self, stored: str) -> None:
        if not (self.can("dtype", "float32") and self.can("kv_dtype", stored)):
            return
        trial, steps = self.random_trial(150, "float32", stored)
        assert {view.dtype for view in trial.views[0].values()} == {getattr(torch, stored)}
        for pieces in steps:
            self.check(trial, pieces, trial.step(pieces), self.rounding(stored))

    @pytest.mark.parametrize("seed", range(6))
    def test_parts_of_the_keys_give_the_whole(self, seed: int) -> None:
        """Ranks that share out the tokens, in each type of the cache. Some have none of a row."""
        if not self.can("part"):
            return
        rng = np.random.default_rng(800 + seed)
        layers = [
            replace(layer, window=None, chunk=None, sinks=None) for layer in self.random_layers(rng)
        ]
        size = int(rng.integers(2, 5))
        run = int(rng.choice([1, 2, 5]))
        block_size = int(rng.choice(self.some("block_size", [4, 16])))
        stored = self.some("kv_dtype", [*TOLERANCES, "float8_e4m3fn"])
        # long rows are cut into ranges, and rows with common blocks read them together
        lengths = [1, 3, 40, self.long_row, int(rng.integers(1, 90))]
        rest = (block_size, lengths, seed, self.usual, stored[seed % len(stored)])
        self.check_parts(layers, Share(0, size, run), rest, random_steps(rng, lengths))

    def check_parts(
        self,
        layers: Sequence[AttentionLayer],
        share: Share,
        rest: tuple[Any, ...],
        steps: Iterator[list[Piece]],
    ) -> None:
        """Compare what all ranks give together with the reference. share: of the first rank. rest:
        of the arguments of a `Trial`."""
        whole = Trial(self, layers, *rest)
        parts = [
            PartTrial(
                replace(share, rank=rank),
                self,
                [replace(layer, is_part=True) for layer in layers],
                *rest,
            )
            for rank in range(share.size)
        ]
        for pieces in steps:
            of_ranks: list[Any] = [trial.step(pieces) for trial in parts]
            outputs = {
                layer.layer_index: joined([each[layer.layer_index] for each in of_ranks]).flatten(1)
                for layer in layers
            }
            self.check(whole, pieces, outputs, self.rounding(rest[4]))

    @pytest.mark.parametrize("stored", FLOAT8)
    @pytest.mark.parametrize("seed", range(3))
    def test_8_bit_floats_are_rounded_to_the_nearest(self, stored: str, seed: int) -> None:
        """Attention to a single token returns its value: the code nearest to value / scale, times
        the scale. What is larger than all codes becomes the largest."""
        if not (self.can("dtype", "float32") and self.can("kv_dtype", stored)):
            return
        rng = np.random.default_rng(700 + seed)
        layer = replace(self.random_layers(rng)[0], sinks=None)
        trial = Trial(
            self, [layer], self.some("block_size", [4, 16])[0], [1], seed, "float32", stored
        )
        values = np.exp(rng.normal(0, 5, (1, layer.num_kv_heads, layer.head_dim))).astype(
            np.float32
        )
        values *= rng.choice([-1, 0, 1], values.shape)
        trial.v[0] = [torch.from_numpy(values).to(self.device)]
        actual = trial.step([Piece(0, 0, 1)])[0].view(layer.num_kv_heads, -1, layer.head_dim)
        scale = trial.layers[0].v_scale
        assert scale is not None
        expected = (
            nearest(values[0] / scale.cpu().numpy()[:, None], *FLOAT8[stored])
            * scale.cpu().numpy()[:, None]
        )
        np.testing.assert_allclose(
            actual.cpu().numpy(), expected[:, None].repeat(actual.shape[1], 1), rtol=1e-6
        )

    def check(
        self,
        trial: Trial,
        pieces: Sequence[Piece],
        outputs: dict[int, Tensor],
        tolerance: float | None = None,
    ) -> None:
        for index, expected in trial.expected(pieces).items():
            actual = outputs[index].float()
            allowed = tolerance or TOLERANCES[str(outputs[index].dtype).removeprefix("torch.")]
            torch.testing.assert_close(
                actual,
                expected,
                atol=allowed,
                rtol=allowed,
                msg=lambda m: f"{trial.layers} {pieces}: {m}",
            )

    @pytest.mark.parametrize("seed", range(4))
    def test_rows_do_not_see_their_neighbors(self, seed: int) -> None:
        """A row gives the same result alone and in a batch."""
        (together, steps) = self.random_trial(200 + seed)
        (alone, _) = self.random_trial(200 + seed)
        allowed = TOLERANCES[self.usual]
        for pieces in steps:
            outputs = together.step(pieces)
            singles = [alone.step([piece]) for piece in pieces]
            for index, out in outputs.items():
                torch.testing.assert_close(
                    out,
                    torch.cat([single[index] for single in singles]),
                    atol=allowed,
                    rtol=allowed,
                )

    @pytest.mark.parametrize("seed", range(4))
    def test_what_unused_slots_contain_makes_no_difference(self, seed: int) -> None:
        """Memory that had another layer's state may contain NaN. A slot is read only after a key
        was written there."""
        trial, steps = self.random_trial(250 + seed, self.some("dtype", ["bfloat16", "float32"])[0])
        for named in trial.views.values():
            for view in named.values():
                view.fill_(float("nan"))
        for pieces in steps:
            self.check(trial, pieces, trial.step(pieces), TOLERANCES["bfloat16"])

    def test_the_same_steps_give_the_same_bits(self) -> None:
        (first, steps) = self.random_trial(300)
        (second, _) = self.random_trial(300)
        for pieces in steps:
            outputs = first.step(pieces)
            again = second.step(pieces)
            assert all(torch.equal(outputs[index], again[index]) for index in outputs)

    def test_tokens_without_a_slot_are_not_stored(self) -> None:
        """Slot −1 writes nothing: the blocks of such a row keep every byte, and other rows are not
        affected."""
        rng = np.random.default_rng(400)
        block_size = self.some("block_size", [4, 16])[0]
        trial = Trial(self, self.random_layers(rng), block_size, [9, 1, 6], 400, self.usual)
        pieces = [Piece(1, 0, 1), Piece(0, 0, 9), Piece(2, 0, 6)]
        blocks = trial.tables[0].long().to(self.device)
        before = [view[blocks].clone() for named in trial.views.values() for view in named.values()]
        outputs = trial.step(pieces, unstored=frozenset({0}))
        allowed = TOLERANCES[self.usual]
        after = [view[blocks] for named in trial.views.values() for view in named.values()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        for index, expected in trial.expected(pieces).items():
            for tokens in (slice(0, 1), slice(10, 16)):
                torch.testing.assert_close(
                    outputs[index][tokens].float(), expected[tokens], atol=allowed, rtol=allowed
                )

    def test_a_layer_may_read_the_cache_of_another(self) -> None:
        """With `shares_kv_with`, k and v are None, and the layer writes nothing."""
        rng = np.random.default_rng(500)
        owner = self.random_layers(rng)[0]
        reader = AttentionLayer(
            layer_index=1,
            num_heads=owner.num_heads,
            num_kv_heads=owner.num_kv_heads,
            head_dim=owner.head_dim,
            scale=0.3,
            shares_kv_with=0,
        )
        block_size = self.some("block_size", [4, 16])[0]
        trial = Trial(self, [owner, reader], block_size, [7, 20], 500, self.usual)
        for pieces in random_steps(rng, trial.lengths):
            self.check(trial, pieces, trial.step(pieces))

    @pytest.mark.parametrize("seed", range(6))
    def test_attention_to_the_output_of_an_encoder(self, seed: int) -> None:
        """It is stored by a call of its own. Then every token is a row that sees all of it."""
        rng = np.random.default_rng(700 + seed)
        sizes = [int(rng.integers(1, 60)) for _ in range(4)]
        layers = [
            replace(layer, window=None, chunk=None, encoder_tokens=64)
            for layer in self.random_layers(rng)
        ]
        block_size = self.some("block_size", [4, 16])[0]
        trial = Trial(self, layers, block_size, sizes, 700 + seed, self.usual)
        allowed = max(1e-4, TOLERANCES[self.usual])
        width = max(map(len, trial.tables))
        blocks = np.stack(
            [np.pad(table.numpy(), (0, width - len(table))) for table in trial.tables]
        )
        cross = CrossInputs(
            block_size,
            blocks,
            np.array(sizes, np.int32),
            lambda *shape, dtype=torch.int64: Buffer(shape, dtype, self.device, None),
            64,
        )
        for row in range(len(sizes)):
            trial.backend.plan(cross.storing(row, self.device))
            for index, call in trial.calls.items():
                call(*(each[index][row] for each in (trial.q, trial.k, trial.v)))
        for padding in (0, 3):
            rows = rng.integers(0, len(sizes), int(rng.integers(1, 40)))
            cross.fill(rows)
            trial.backend.plan(cross.send(len(rows), len(rows) + padding))
            for layer in trial.layers:
                index = layer.layer_index
                q = torch.cat([trial.q[index][row][:1] for row in rows])
                padded = torch.cat([q, torch.zeros_like(q[:1]).expand(padding, -1, -1)])
                result = trial.calls[index](padded, None, None)[: len(rows)]
                for place, row in enumerate(rows.tolist()):
                    # the reference attends to all keys from the last position
                    queries = q[place : place + 1]
                    table = trial.tables[row][None].to(self.device)
                    expected = paged_attention(
                        queries,
                        *trial.caches[index],
                        table,
                        torch.tensor([0, 1]),
                        torch.tensor([sizes[row]]),
                        layer.scale,
                        soft_cap=layer.soft_cap,
                        sinks=layer.sinks,
                    )
                    torch.testing.assert_close(
                        result[place], expected[0].flatten(), rtol=allowed, atol=allowed
                    )

    def test_a_window_may_drop_old_blocks_but_no_others(self) -> None:
        trial, _ = self.random_trial(600)
        plain = AttentionLayer(
            layer_index=0,
            num_heads=2,
            num_kv_heads=2,
            head_dim=self.some("head_dim", [64])[0],
            scale=1.0,
        )
        assert not isinstance(trial.backend.kv_spec(plain, "float32").retain, Window | Chunk)
        if self.can("window"):
            narrow = AttentionLayer(
                layer_index=0,
                num_heads=2,
                num_kv_heads=2,
                head_dim=plain.head_dim,
                scale=1.0,
                window=32,
            )
            retain = trial.backend.kv_spec(narrow, "float32").retain
            assert not isinstance(retain, Window) or retain.tokens >= 32
        if self.can("chunk"):
            local = AttentionLayer(
                layer_index=0,
                num_heads=2,
                num_kv_heads=2,
                head_dim=plain.head_dim,
                scale=1.0,
                chunk=32,
            )
            assert trial.backend.kv_spec(local, "float32").retain in (Chunk(32), Full())

    def test_what_is_not_declared_is_refused_with_a_reason(self) -> None:
        """Selection compares the need of a layer with `supports`. Each refusal names the
        feature."""
        for feature in FEATURES:
            reasons = unmet(self.spec.supports, {feature: True})
            assert reasons == [] or feature in reasons[0]
            assert (reasons == []) == bool(self.spec.supports.get(feature))
        for feature, wrong in (("dtype", "int3"), ("kv_dtype", "int3"), ("head_dim", 12345677)):
            reasons = unmet(self.spec.supports, {feature: wrong})
            is_any = self.spec.supports.get(feature) is True
            assert is_any or (len(reasons) == 1 and feature in reasons[0]), (
                f"{feature}={wrong!r} must be refused"
            )
