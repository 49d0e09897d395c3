"""Contract tests of the kind `quantization`. A plugin's test file:

    class TestMyFormat(QuantizationContract):
        spec = MY_FORMAT
        config = {"quant_method": "mine"}
        block = 32

        def method(self, setup: QuantizationSetup) -> QuantizationMethod:
            return MyFormat(None, setup)

        def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece],
        Tensor]:
            ...  # the pieces of `values` as the checkpoint stores them, and the float32 values they
            represent

A format may lose precision between the original weights and what `stored` returns. Results must be
exact for the stored values, up to the compute type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pegboard.errors import ModelError, PegboardError
from pegboard.interfaces.attention import AttentionLayer
from pegboard.interfaces.quantization import (
    DividedMethod,
    EmbeddingLayer,
    LinearLayer,
    Part,
    QuantizationMethod,
    QuantizationSetup,
    QuantizationSpec,
    WeightMethod,
)
from pegboard.interfaces.spec import unmet
from pegboard.interfaces.weight_loader import TensorEntry, WantedWeight, WeightPiece
from pegboard.layers.shards import part_of
from pegboard_testing.fake_build import references
from pegboard_testing.held_memory import held_bytes, unnamed_bytes

TOLERANCES = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}
"""The allowed error of a product, relative to its largest value."""


def stored_pieces(module: str, tensors: Mapping[str, Tensor]) -> list[WeightPiece]:
    """Return the tensors of a module, {"qweight": …}, as pieces of a checkpoint."""
    return [
        WeightPiece(
            f"{module}.{name}",
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tensor,
        )
        for name, tensor in tensors.items()
    ]


def tensor_index(pieces: Iterable[WeightPiece]) -> dict[str, TensorEntry]:
    """Return the index of a checkpoint that consists of these pieces."""
    return {
        piece.name: TensorEntry(
            piece.name, tuple(piece.shape), piece.stored, "", 0, piece.data.nbytes
        )
        for piece in pieces
    }


def check_division(weight: WeightMethod, pieces: Sequence[WeightPiece]) -> list[WantedWeight]:
    """Declare a weight of a checkpoint that consists of these pieces, and let it check its
    division. Returns what it wants."""
    index = tensor_index(pieces)
    wanted = weight.declare(index)
    if isinstance(weight, DividedMethod):
        first = {each.name for each in wanted if each.is_first}
        weight.check_division(index, {piece.name: piece for piece in pieces if piece.name in first})
    return wanted


def load_pieces(weight: WeightMethod, pieces: Sequence[WeightPiece]) -> None:
    """Load a weight from a checkpoint that consists of these pieces: those that it declares, in the
    given order."""
    wanted = {declared.name for declared in check_division(weight, pieces)}
    for piece in pieces:
        if piece.name in wanted:
            weight.accept(piece)
    weight.finish()


WRONG_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    3,
    -32,
    2**40,
    10**30,
    1.5,
    math.nan,
    "",
    "x",
    "²x²",
    "re:(",
    [],
    ["x"],
    [None],
    [2**40, 10**30],
    {},
    {"x": 1},
    {"x": {}},
    [{}],
)


KV_SETTINGS: dict[str, Any] = {
    "kv_cache_scheme": {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
    },
    "kv_cache_quant_algo": "FP8",
    "kv_cache_group": ["*k_proj", "*v_proj"],
    "kv_cache_quant_config": {
        "weight": None,
        "output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
    },
}
"""What compressed-tensors, ModelOpt and Quark say about the KV cache."""


def wrong_configs(config: Any) -> Iterator[Any]:
    """Yield the config with one value left out or replaced, for every value at every depth."""
    items = list(config.items() if isinstance(config, Mapping) else enumerate(config))
    for key, value in items:
        others = [pair for pair in items if pair[0] != key]
        yield _like(config, others)
        nested = wrong_configs(value) if isinstance(value, Mapping | list | tuple) else ()
        for wrong in (*WRONG_VALUES, *nested):
            yield _like(config, [(name, wrong if name == key else old) for name, old in items])


def _like(config: Any, items: Iterable[tuple[Any, Any]]) -> Any:
    return dict(items) if isinstance(config, Mapping) else [value for _, value in items]


class QuantizationContract:
    """Every quantization method passes these. Override `spec`, `method` and `stored`. If they
    differ, also override `config`, `block` and `row_block` (how many columns and rows are stored
    together), `cut_block` (columns between which ranks can divide a matrix; 0 = `block`),
    `undivided` (what they cannot divide: "rows", "columns"), `tolerance` (a factor on TOLERANCES,
    for methods that also quantize activations) and `only_experts` (the method leaves all other
    layers plain)."""

    spec: QuantizationSpec
    config: Mapping[str, Any] = {}
    block = 1
    row_block = 1
    cut_block = 0
    undivided: frozenset[str] = frozenset()
    device = "cpu"
    tolerance = 1.0
    only_experts = False

    def method(self, setup: QuantizationSetup) -> QuantizationMethod:
        """Return a new method."""
        raise AssertionError("override QuantizationContract.method")

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        """Return `values` [rows, columns] as pieces, and the values that they represent. dtype:
        type of the activations."""
        raise AssertionError("override QuantizationContract.stored")

    # --- setting up -------------------------------------------------------------------------------

    def make(self, dtype: str = "float32") -> QuantizationMethod:
        return self.method(QuantizationSetup(self.config, dtype, self.device, references()))

    def values(self, seed: int, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))

    def layer(self, rows: Sequence[int], columns: int) -> LinearLayer:
        """Return a weight that is merged from parts with these numbers of rows, times
        `row_block`."""
        parts = []
        start = 0
        for index, count in enumerate(rows):
            stop = start + count * self.row_block
            parts.append(Part(f"model.part{index}.weight", (start, stop)))
            start = stop
        return LinearLayer(
            "model.merged", columns, start, tuple(parts), num_experts=1 if self.only_experts else 0
        )

    def fill(
        self, weight: WeightMethod, layer: LinearLayer, seed: int, dtype: str = "float32"
    ) -> Tensor:
        """Load random values, the last part first, and return the matrix that they represent."""
        matrix = torch.empty(layer.out_features, layer.in_features)
        pieces: list[WeightPiece] = []
        for index, part in reversed(list(enumerate(layer.parts))):
            start, stop = part.rows
            stored, true = self.stored(
                part, self.values(seed + index, stop - start, layer.in_features), dtype
            )
            pieces += stored
            matrix[start:stop] = true
        load_pieces(weight, pieces)
        return matrix

    def linear(self, layer: LinearLayer, dtype: str = "float32") -> WeightMethod:
        weight = self.make(dtype).linear(layer)
        assert weight is not None, "the method quantizes no linear layer"
        return weight

    def check(self, actual: Tensor, x: Tensor, matrix: Tensor) -> None:
        expected = x.float().cpu() @ matrix.T
        dtype = str(x.dtype).removeprefix("torch.")
        allowed = TOLERANCES[dtype] * self.tolerance * float(expected.abs().max())
        assert actual.dtype == x.dtype, f"activations are {x.dtype}, the product is {actual.dtype}"
        torch.testing.assert_close(actual.float().cpu(), expected, atol=allowed, rtol=0)

    def activations(self, count: int, width: int, dtype: str = "float32") -> Tensor:
        return self.values(99, count, width).to(getattr(torch, dtype)).to(self.device)

    # --- the contract -----------------------------------------------------------------------------

    @pytest.mark.parametrize("axis", ["rows", "columns"])
    def test_ranks_hold_parts_of_the_matrix(self, axis: str) -> None:
        """Each of two ranks holds the same part of the matrix that one rank would hold. What
        `undivided` names is refused."""
        columns = (self.cut_block or self.block) * 4
        whole = self.layer((8, 4), columns)
        stored = [
            self.stored(part, self.values(i, part.rows[1] - part.rows[0], columns), "float32")
            for i, part in enumerate(whole.parts)
        ]
        for rank in range(2):
            layer, expected = self.of_rank(whole, [true for _, true in stored], axis, rank)
            weight = self.linear(layer)
            pieces = [piece for pieces, _ in stored for piece in pieces]
            if axis in self.undivided:
                with pytest.raises(ModelError, match="divide"):
                    load_pieces(weight, pieces)
                continue
            load_pieces(weight, pieces)
            allowed = TOLERANCES["float32"] * float(expected.abs().max())
            torch.testing.assert_close(weight.dequantize().cpu(), expected, atol=allowed, rtol=0)
            x = self.activations(3, layer.in_features)
            self.check(weight.bind(references())(x), x, expected)

    @settings(
        max_examples=20, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
    )
    @given(data=st.data())
    def test_what_cannot_be_divided_is_refused_first(self, data: st.DataObject) -> None:
        """Wherever ranks divide a matrix, the weight says so before its pieces come, or holds the
        right part."""
        rows = 4 * self.row_block
        columns = (self.cut_block or self.block) * 4
        part = Part("model.part0.weight", (0, rows))
        pieces, true = self.stored(part, self.values(5, rows, columns), "float32")
        unit = data.draw(st.sampled_from((1, 16, 32)))
        row = data.draw(st.integers(1, rows))
        column = data.draw(st.integers(1, -(-columns // unit))) * unit
        span = (0, min(column, columns))
        cut = part_of(part.name, 0, (rows, columns), (0, row), span)
        experts = 1 if self.only_experts else 0
        weight = self.linear(LinearLayer("model.merged", span[1], row, (cut,), num_experts=experts))
        try:
            check_division(weight, pieces)
        except ModelError as error:
            assert part.name in str(error) and "use " in str(error)
            return
        load_pieces(weight, pieces)
        allowed = TOLERANCES["float32"] * float(true.abs().max())
        held = true[:row, : span[1]]
        torch.testing.assert_close(weight.dequantize().cpu(), held, atol=allowed, rtol=0)

    def of_rank(
        self, whole: LinearLayer, matrices: Sequence[Tensor], axis: str, rank: int
    ) -> tuple[LinearLayer, Tensor]:
        """Return what a rank holds of the layer if two divide its rows or columns, and its
        values."""
        parts: list[Part] = []
        held = []
        start = 0
        for part, matrix in zip(whole.parts, matrices, strict=True):
            rows, columns = matrix.shape
            first = rows // 2 // self.row_block * self.row_block
            if axis == "rows":
                spans = [((0, first), (first, rows))[rank], (0, columns)]
            else:
                spans = [(0, rows), ((0, columns // 4), (columns // 4, columns))[rank]]
            parts.append(part_of(part.name, start, (rows, columns), *spans))
            start = parts[-1].rows[1]
            held.append(matrix[slice(*spans[0]), slice(*spans[1])])
        columns = held[0].shape[1]
        layer = replace(whole, in_features=columns, out_features=start, parts=tuple(parts))
        return layer, torch.cat(held)

    @pytest.mark.parametrize("dtype", TOLERANCES)
    @pytest.mark.parametrize("rows", [(5,), (8, 3, 3), (1, 70)], ids=str)
    def test_merged_parts_multiply_as_one_matrix(self, rows: tuple[int, ...], dtype: str) -> None:
        """Parts reach their rows in whatever order they arrive. Every declared activation type
        computes in that type."""
        if unmet(self.spec.supports, {"dtype": dtype}):
            return
        layer = self.layer(rows, self.block * 3)
        weight = self.linear(layer, dtype)
        matrix = self.fill(weight, layer, 1, dtype)
        call = weight.bind(references())
        for count in (1, 2, 33):
            x = self.activations(count, layer.in_features, dtype)
            self.check(call(x), x, matrix)

    @pytest.mark.parametrize("dtype", TOLERANCES)
    def test_experts_multiply_their_own_rows(self, dtype: str) -> None:
        """The matrices of experts are parts below each other. An expert may have no rows."""
        if unmet(self.spec.supports, {"dtype": dtype}):
            return
        layer = replace(self.layer((2, 3) * 3, self.block * 2), num_experts=3)
        weight = self.linear(layer, dtype)
        matrices = self.fill(weight, layer, 9, dtype).view(3, -1, layer.in_features)
        bind_experts = getattr(weight, "bind_experts", None)
        assert bind_experts is not None, "a weight of experts needs bind_experts"
        call = bind_experts(references(), 3, None)
        x = self.activations(7, layer.in_features, dtype)
        products = call(x, torch.tensor([0, 3, 3, 7], dtype=torch.int32))
        self.check(products[:3], x[:3], matrices[0])
        self.check(products[3:], x[3:], matrices[2])

    def test_experts_can_change_places(self) -> None:
        """If `expert_memory` names the memory of experts, it is all that they need."""
        layer = replace(self.layer((2, 3) * 3, self.block * 2), num_experts=3)
        weight = self.linear(layer)
        matrices = self.fill(weight, layer, 9).view(3, -1, layer.in_features)
        find: Any = getattr(weight, "expert_memory", lambda count: None)
        if (memory := find(3)) is None:
            return
        call = weight.bind_experts(references(), 3, None)  # type: ignore[attr-defined]
        for one, other in zip(memory.experts[0], memory.experts[2], strict=True):
            assert one.is_contiguous(), "the memory of an expert is copied as bytes"
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
        x = self.activations(7, layer.in_features)
        products = call(x, torch.tensor([0, 3, 5, 7], dtype=torch.int32))
        for start, stop, expert in ((0, 3, 2), (3, 5, 1), (5, 7, 0)):
            self.check(products[start:stop], x[start:stop], matrices[expert])

    def test_dequantize_gives_the_stored_values(self) -> None:
        layer = self.layer((6, 4), self.block * 2)
        weight = self.linear(layer)
        matrix = self.fill(weight, layer, 2)
        values = weight.dequantize()
        assert values.dtype == torch.float32
        torch.testing.assert_close(values.cpu(), matrix, atol=1e-6, rtol=1e-6)

    def test_the_input_is_not_changed(self) -> None:
        layer = self.layer((4,), self.block)
        weight = self.linear(layer)
        self.fill(weight, layer, 3)
        x = self.activations(5, self.block)
        before = x.clone()
        weight.bind(references())(x)
        assert torch.equal(x, before)

    def test_a_reload_reaches_calls_that_are_bound(self) -> None:
        """A second `accept` and `finish` write to the same addresses, so recordings and bound calls
        stay valid."""
        layer = self.layer((4, 4), self.block * 2)
        weight = self.linear(layer)
        old = self.fill(weight, layer, 4)
        call = weight.bind(references())
        x = self.activations(3, layer.in_features)
        self.check(call(x), x, old)
        new = self.fill(weight, layer, 40)
        assert not torch.allclose(old, new)
        self.check(call(x), x, new)

    @pytest.mark.parametrize("is_head", [False, True])
    def test_embedding_and_tied_head_share_one_table(self, is_head: bool) -> None:
        num_rows = 11
        width = self.block * 2
        part = Part("model.embed.weight", (0, num_rows))
        layer = EmbeddingLayer("model.embed", num_rows, width, part, is_head)
        weight = self.make().embedding(layer)
        if weight is None:
            return  # the plain method handles it
        as_linear = LinearLayer(layer.path, width, num_rows, (part,))
        table = self.fill(weight, as_linear, 6)
        ids = torch.tensor([0, 10, 3, 3], device=self.device)
        rows = weight.bind(references())(ids)
        torch.testing.assert_close(rows.float().cpu(), table[ids.cpu()], atol=1e-6, rtol=1e-6)
        if is_head:
            bind_head = getattr(weight, "bind_head", None)
            assert bind_head is not None, (
                "an embedding with is_head must also multiply: bind_head is missing"
            )
            x = self.activations(3, width)
            self.check(bind_head(references())(x), x, table)

    def test_the_memory_is_at_most_twice_the_float32_weight(self) -> None:
        layer = self.layer((8,), self.block * 2)
        weight = self.linear(layer)
        self.fill(weight, layer, 7)
        most = 2 * 4 * layer.out_features * layer.in_features
        assert 0 < held_bytes(weight) <= most, "twice the float32 weight is too much for any format"

    def test_all_memory_that_grows_with_the_rows_is_named(self) -> None:
        """Memory that `tensors` does not name is not counted, and stays while the engine sleeps.
        Tables and orders of columns may stay."""
        unnamed = []
        for rows in (16, 64):
            layer = self.layer((rows,), self.block * 2)
            weight = self.linear(layer)
            self.fill(weight, layer, 7)
            weight.bind(references())
            unnamed.append(unnamed_bytes(weight))
        assert unnamed[0] == unnamed[1], f"{unnamed[1]} bytes of a weight are not in its tensors()"

    def test_a_reload_writes_all_memory_that_is_named(self) -> None:
        """As after a sleep of level 2, which leaves zeros."""
        layer = self.layer((4, 4), self.block * 2)
        weight = self.linear(layer)
        self.fill(weight, layer, 4)
        call = weight.bind(references())
        x = self.activations(3, layer.in_features)
        before = call(x)
        for tensor in weight.tensors():
            tensor.zero_()
        assert not torch.equal(call(x), before)
        self.fill(weight, layer, 4)
        assert torch.equal(call(x), before)

    def test_a_piece_that_does_not_fit_is_refused_by_name(self) -> None:
        layer = self.layer((6,), self.block * 2)
        weight = self.linear(layer)
        pieces, _ = self.stored(
            layer.parts[0], self.values(8, layer.out_features, self.block), "float32"
        )
        with pytest.raises(PegboardError, match=r"model\.part0.*shape"):
            load_pieces(weight, pieces)

    def test_a_config_with_a_wrong_value_is_read_or_refused(self) -> None:
        """Each value of the config is left out, and replaced by values of other types and by
        impossible sizes. The method reads the weight anyway, or raises a PegboardError. Small and
        large weights are tried, because a size may fit one of them."""
        for rows, columns in ((1, self.block), (3, self.block * 2)):
            layer = self.layer((rows,), columns)
            pieces, _ = self.stored(
                layer.parts[0], self.values(10, layer.out_features, columns), "float32"
            )
            for config in wrong_configs(self.config):
                self.read_or_refuse(
                    config, lambda method, layer=layer: method.linear(layer), pieces
                )

    def test_an_embedding_of_a_wrong_config_is_read_or_refused(self) -> None:
        """The same for an embedding table that is also the output head."""
        part = Part("model.embed.weight", (0, 3 * self.row_block))
        layer = EmbeddingLayer("model.embed", part.rows[1], self.block * 2, part, is_head=True)
        pieces, _ = self.stored(part, self.values(11, layer.num_rows, layer.width), "float32")
        for config in wrong_configs(self.config):
            self.read_or_refuse(config, lambda method: method.embedding(layer), pieces)

    def test_wrong_settings_of_the_kv_cache_are_read_or_refused(self) -> None:
        """Configs of any method may say how the KV cache is stored. Each of these values is
        replaced in turn."""
        layer = AttentionLayer(layer_index=0, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
        for key, value in KV_SETTINGS.items():
            for wrong in (
                value,
                *WRONG_VALUES,
                *wrong_configs(value if isinstance(value, Mapping | list) else {}),
            ):
                self.read_or_refuse(
                    {**self.config, key: wrong}, lambda method: method.kv_cache(layer), ()
                )

    def read_or_refuse(
        self,
        config: Any,
        make: Callable[[QuantizationMethod], WeightMethod | str | None],
        pieces: Sequence[WeightPiece],
    ) -> None:
        """Make something of a method with this config, and load it if it is a weight. All errors
        but a PegboardError fail."""
        try:
            weight = make(
                self.method(QuantizationSetup(config, "float32", self.device, references()))
            )
            if weight is not None and not isinstance(weight, str):
                load_pieces(weight, pieces)
        except PegboardError:
            return
        except Exception as error:
            raise AssertionError(
                f"the config {config} raised {error!r}; expected a PegboardError"
            ) from error

    def test_undeclared_activations_are_refused_with_a_reason(self) -> None:
        reasons = unmet(self.spec.supports, {"dtype": "int3"})
        assert len(reasons) == 1 and "dtype" in reasons[0]
