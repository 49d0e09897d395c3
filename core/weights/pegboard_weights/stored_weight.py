"""The life of a weight that a checkpoint stores in several tensors: scales, zero points and packed
integers.

A format plugin has a `FormatMethod`, which gives each module a `Reader`. A reader says which
tensors a part of a weight is read from, and turns them into `Blocks`, `FloatCodes` or floats. Parts
of a merged weight may have different readers: parts of another form, or with another transform of
the activations, are held side by side.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import (
    Cut,
    EmbeddingLayer,
    ExpertMemory,
    LinearLayer,
    Part,
    QuantizationSetup,
    RepackEntry,
)
from pegboard.interfaces.weight_loader import Box, TensorEntry, WantedWeight, WeightPiece, joined
from pegboard.ops.blocks import Blocks
from pegboard.ops.experts import one_by_one
from pegboard.ops.float_codes import FloatCodes
from pegboard.ops.linear import make_float_weight
from pegboard.ops.rounding import Rounding
from pegboard_weights.asked_rounding import SCALE, ZERO, AskedRounding, checked_scale, kernel_of
from pegboard_weights.composed import (
    Bound,
    BoundExperts,
    SideBySide,
    Transform,
    Transformed,
    are_equal,
    replace,
)
from pegboard_weights.cuts import Grid, cut_out

Kernels = Mapping[str, Callable[..., Any]]
Pieces = Mapping[str, WeightPiece]
AnyLayer = LinearLayer | EmbeddingLayer
Form = Literal["float_weight", "block_weight", "code_weight"]
"""The weight format that holds floats, `Blocks` or `FloatCodes`."""
NOT_READ = memoryview(b"")
"""The data of a tensor of which only the shape and the type are known."""
WHOLE = (torch.int8, torch.int32, torch.int64)
"""Types of stored zero points of activations."""
PLAIN = ("float32", "bfloat16", "float16")
"""Types of weights that are not quantized."""
FORMS: Mapping[Form, type] = {"block_weight": Blocks, "code_weight": FloatCodes}


TRANSFORMED = Grid(whole_columns="was quantized for activations that are transformed")


class Reader(Protocol):
    """Reads parts of weights in one format."""

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        """Return the tensors that a part with this number of columns is read from. available: the
        checkpoint's tensors."""

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        """Return the form of what `read` returns. Called before a cache is asked, with all pieces,
        and with those that `grid` gets."""

    def read(self, part: Part, columns: int, pieces: Pieces) -> Blocks | FloatCodes | Tensor:
        """Return the rows of the part, packed or as floats [rows, columns]. Raises ModelError if
        the tensors do not fit."""

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        """Return where what `read` returns can be divided. It is asked, after `form`, about parts
        that ranks divide. pieces: only tensors that were declared with `is_first` have their data;
        of the others, the shape and the type are known."""

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        """Return JSON values that determine, together with the checkpoint, what `read` returns.
        They include a number that changes whenever the same tensors are read as other values."""


@runtime_checkable
class TransformReader(Protocol):
    """An optional addition to a Reader: the part was quantized for activations that are
    transformed. The reader's grid then keeps columns whole (`TRANSFORMED`)."""

    def transform(self, part: Part, columns: int, pieces: Pieces) -> Transform | None:
        """Return the transform, on the CPU. None = there is none. It is not kept in the repack
        cache."""


@runtime_checkable
class BoxReader(Protocol):
    """An optional addition to a Reader: what a rank holds of a matrix is read from a part of a
    tensor, whatever the rest contains."""

    def boxes(self, weight: WantedWeight, cut: Cut) -> tuple[Box, ...]:
        """Return the parts of one of the reader's tensors that a cut is read from; () = all."""


class PlainReader:
    """Reads a part that is stored as floats."""

    def tensors(
        self, part: Part, columns: int, available: Mapping[str, TensorEntry]
    ) -> list[WantedWeight]:
        return [WantedWeight(part.name, (part.rows[1] - part.rows[0], columns))]

    def form(self, part: Part, columns: int, pieces: Pieces) -> Form:
        return "float_weight"

    def read(self, part: Part, columns: int, pieces: Pieces) -> Blocks | FloatCodes | Tensor:
        return floats(pieces, part.name)

    def grid(self, part: Part, columns: int, pieces: Pieces) -> Grid:
        return Grid()

    def key(self, part: Part, pieces: Pieces) -> Sequence[object]:
        return ["plain"]


class KeptFloats(PlainReader):
    """Reads a part whose floats are kept."""

    def boxes(self, weight: WantedWeight, cut: Cut) -> tuple[Box, ...]:
        return (cut.box,)


def words_of(codes: tuple[int, int], bits: int) -> tuple[int, int]:
    """Return the 32-bit words in which these codes of a row are, [start, stop)."""
    return codes[0] * bits // 32, -(-codes[1] * bits // 32)


def code_form(columns: int, block_columns: int) -> Form:
    """Return the form of `FloatCodes` of this shape: packed if kernels take it, else floats, as
    which they are to be read."""
    is_whole = block_columns >= columns or block_columns % 16 == 0
    return "code_weight" if is_whole and columns % 32 == 0 else "float_weight"


def stored_as(
    available: Mapping[str, TensorEntry], name: str, *shapes: tuple[int, ...]
) -> WantedWeight:
    """Return the tensor with the shape that the checkpoint has, if it is one of `shapes`, or else
    with the first."""
    weight = available.get(name)
    return WantedWeight(
        name, weight.shape if weight is not None and weight.shape in shapes else shapes[0]
    )


def floats(pieces: Pieces, name: str) -> Tensor:
    """Return a tensor of floats. Raises ModelError if it is stored as something else."""
    return _checked(pieces[name], lambda data: data.is_floating_point(), "floats")


def scales_of(pieces: Pieces, name: str) -> Tensor:
    """Return a tensor of scales as `Blocks` takes them, see `in_half`."""
    return in_half(floats(pieces, name))


def in_half(values: Tensor) -> Tensor:
    """Return floats as float16 if that is exact, which it is for nearly all scales in bfloat16,
    else as float32."""
    if values.dtype == torch.float16:
        return values
    half = values.half()
    return half if torch.equal(half.float(), values.float()) else values.float()


def tensor_of(pieces: Pieces, name: str, *dtypes: torch.dtype) -> Tensor:
    """Return a tensor of one of these types. Raises ModelError if it is stored as something
    else."""
    expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return _checked(pieces[name], lambda data: data.dtype in dtypes, expected)


def _checked(piece: WeightPiece, fits: Callable[[Tensor], bool], expected: str) -> Tensor:
    if not isinstance(piece.data, Tensor) or not fits(piece.data):
        raise ModelError(
            f"tensor {piece.name} is stored as {piece.stored}; this format needs {expected}"
        )
    return piece.data


class FormatMethod:
    """A quantization method whose weights have readers. A subclass defines `reader`. kv_dtype:
    torch name of the type in which the checkpoint wants keys and values stored; None = it does not
    say."""

    kv_dtype: str | None = None

    def __init__(self, setup: QuantizationSetup) -> None:
        self.setup = setup

    def reader(self, module: str, layer: AnyLayer) -> Reader | None:
        """Return how the module is stored, or None if it is not quantized. module: its path in the
        checkpoint ("model.layers.0.self_attn.q_proj"), which is one part of the layer."""
        raise AssertionError(f"{type(self).__name__} overrides reader")

    def rounding(self, module: str, layer: AnyLayer) -> AskedRounding | None:
        """Return how the activations of a quantized module are to be rounded. See
        `choose_rounding`."""
        return None

    def linear(self, layer: LinearLayer) -> StoredWeight | None:
        return self._weight(layer, layer.parts, (layer.out_features, layer.in_features))

    def embedding(self, layer: EmbeddingLayer) -> StoredWeight | None:
        return self._weight(layer, (layer.part,), (layer.num_rows, layer.width))

    def kv_cache(self, layer: object) -> str | None:
        return self.kv_dtype

    def _weight(
        self, layer: AnyLayer, parts: Sequence[Part], shape: tuple[int, int]
    ) -> StoredWeight | None:
        whole = layer
        if isinstance(layer, LinearLayer) and parts:
            # what is decided by the columns is decided by those of the checkpoint
            columns = parts[0].shape(layer.in_features)[1]
            whole = dataclasses.replace(layer, in_features=columns)
        readers = {part: self.reader(module_of(part), whole) for part in parts}
        if not any(readers.values()):
            return None
        kind = StoredTable if isinstance(layer, EmbeddingLayer) else StoredWeight
        weight = kind(
            layer.path,
            shape,
            {part: reader or KeptFloats() for part, reader in readers.items()},
            self.setup,
        )
        weight.num_experts = 0 if isinstance(layer, EmbeddingLayer) else layer.num_experts
        if isinstance(layer, LinearLayer):
            weight.asked = {
                part: asked
                for part, reader in readers.items()
                if reader and (asked := self.rounding(module_of(part), whole))
            }
        return weight


def module_of(part: Part) -> str:
    """Return the path of the checkpoint's module that fills the part."""
    return part.name.removesuffix(".weight")


def columns_of(layer: AnyLayer) -> int:
    """Return the number of columns of the layer's matrix."""
    return layer.width if isinstance(layer, EmbeddingLayer) else layer.in_features


@dataclass(slots=True)
class Span:
    """Adjacent rows [start, stop) of a weight that are held in one op. readers: of the parts in
    these rows. rounding: of the activations; weights of floats have none."""

    start: int
    stop: int
    form: Form
    transform: Transform | None
    rounding: Rounding | None
    readers: dict[Part, Reader]
    op: Any = None


class StoredWeight:
    """One matrix [rows, columns]. See `pegboard.interfaces.quantization.WeightMethod`. Pieces are
    kept until `finish`. Rows without a part (of a padded vocabulary) stay zero. Readers read the
    checkpoint's matrices as a whole, and what this rank holds is cut out of that. num_experts: see
    `LinearLayer`. asked: how the activations of parts are rounded."""

    IS_TABLE = False
    num_experts = 0

    def __init__(
        self,
        path: str,
        shape: tuple[int, int],
        readers: Mapping[Part, Reader],
        setup: QuantizationSetup,
    ) -> None:
        self.path = path
        self.shape = shape
        self.readers = dict(readers)
        self.setup = setup
        self.wanted: dict[str, WantedWeight] = {}
        self.pieces: dict[str, WeightPiece] = {}
        self.spans: list[Span] = []
        self.asked: dict[Part, AskedRounding] = {}

    def declare(self, available: Mapping[str, TensorEntry]) -> list[WantedWeight]:
        """A part of which the checkpoint has none of the format's tensors, but plain floats, is
        plain: routers of experts, which not all configs list."""
        wanted: list[WantedWeight] = []
        for part, reader in self.readers.items():
            tensors = reader.tensors(*self._source(part), available)
            plain = available.get(part.name)
            others = {weight.name for weight in tensors} - {part.name}
            if (
                plain is not None
                and plain.stored in PLAIN
                and others
                and not others & available.keys()
            ):
                self.readers[part] = KeptFloats()
                self.asked.pop(part, None)
                tensors = self.readers[part].tensors(*self._source(part), available)
            chosen = self.readers[part]
            if part.cut is not None and isinstance(chosen, BoxReader):
                tensors = [
                    dataclasses.replace(weight, boxes=chosen.boxes(weight, part.cut))
                    for weight in tensors
                ]
            if part.cut is None:
                tensors = [dataclasses.replace(weight, is_first=False) for weight in tensors]
            wanted += tensors
            asked = self.asked.get(part)
            for ending in () if asked is None else asked.endings:
                wanted.append(stored_as(available, f"{module_of(part)}.{ending}", (1,), ()))
        self.wanted = joined(wanted)
        return list(self.wanted.values())

    def check_division(
        self, available: Mapping[str, TensorEntry], first: Mapping[str, WeightPiece]
    ) -> None:
        """See `DividedMethod`."""
        stored = {name: available[name].stored for name in self.wanted if name in available}
        pieces = {
            name: first.get(name) or WeightPiece(name, stored.get(name, ""), weight.shape, NOT_READ)
            for name, weight in self.wanted.items()
        }
        for part, reader in self.readers.items():
            if part.cut is not None:
                source = self._source(part)
                grid = reader.grid(*source, pieces)
                if reader.form(*source, pieces) == "float_weight":
                    grid = Grid(whole_columns=grid.whole_columns)
                grid.check(part.cut, part.name)

    def accept(self, piece: WeightPiece) -> None:
        wanted = self.wanted.get(piece.name)
        if wanted is None:
            names = ", ".join(self.wanted)
            raise ModelError(f"{self.path} has no place for {piece.name}; it is read from {names}")
        if tuple(piece.shape) != wanted.shape:
            raise ModelError(
                f"tensor {piece.name} has shape {tuple(piece.shape)}; {self.path} expects "
                f"{wanted.shape}"
            )
        self.pieces[piece.name] = piece

    def finish(self) -> None:
        """The next `accept` starts a reload. The bound callables see the new weights when it is
        finished."""
        missing = sorted(self.wanted.keys() - self.pieces.keys())
        if missing:
            raise ModelError(f"{self.path}: the checkpoint did not contain {', '.join(missing)}")
        pieces = self.pieces
        self.pieces = {}
        is_first = not self.spans
        if is_first:
            self.spans = self._split(pieces)
        for span in self.spans:
            if is_first:
                span.op = self._make(span, pieces)
                if span.form != "float_weight" and span.op.restore():
                    continue
            elif span.transform is not None:
                replace(
                    span.transform,
                    self._transform(*next(iter(span.readers.items())), pieces),
                    self.path,
                )
            self._fill(span, pieces)

    def _split(self, pieces: Pieces) -> list[Span]:
        """Return the spans of the weight, without their ops. Parts of the same form and transform
        are one span. If experts need several, none reaches from one expert to the next."""
        reads = [
            Span(
                *part.rows,
                self._form(part, reader, pieces),
                self._transform(part, reader, pieces),
                self._rounding(part, pieces),
                {part: reader},
            )
            for part, reader in self.readers.items()
        ]
        for span in reads:
            span.rounding = None if span.form == "float_weight" else span.rounding
        is_one = all(_are_alike(span, reads[0]) for span in reads)
        step = (
            self.shape[0] // self.num_experts if self.num_experts and not is_one else self.shape[0]
        )
        spans: list[Span] = []
        for span in reads:
            last = spans[-1] if spans and span.start % step else None
            if last is not None and _are_alike(last, span):
                last.readers |= span.readers
                last.stop = span.stop
            else:
                spans.append(span)
        spans[-1].stop = self.shape[0]
        return spans

    def _source(self, part: Part) -> tuple[Part, int]:
        """Return the whole matrix of a part, and its columns."""
        if part.cut is None:
            return part, self.shape[1]
        return Part(part.name, (0, part.cut.shape[0])), part.cut.shape[1]

    def _form(self, part: Part, reader: Reader, pieces: Pieces) -> Form:
        """Return the form that the part is held in. Kernels take no blocks of other numbers of
        columns."""
        form = reader.form(*self._source(part), pieces)
        return form if part.cut is None or self.shape[1] % 32 == 0 else "float_weight"

    def _transform(self, part: Part, reader: Reader, pieces: Pieces) -> Transform | None:
        transform = (
            reader.transform(*self._source(part), pieces)
            if isinstance(reader, TransformReader)
            else None
        )
        return None if transform is None else transform.to(self.setup)

    def _rounding(self, part: Part, pieces: Pieces) -> Rounding | None:
        """Return how the activations of a part are rounded. Stored values are those of all parts
        for which the same is asked."""
        asked = self.asked.get(part)
        if asked is None or not asked.is_static:
            return None if asked is None else asked.rounding()
        modules = {module_of(each) for each, of in self.asked.items() if of == asked}
        stored = []
        for module in sorted(modules):
            name = f"{module}.{SCALE}"
            values = [checked_scale(float(floats(pieces, name).float().max()), name)]
            if not asked.is_symmetric:
                values.append(int(tensor_of(pieces, f"{module}.{ZERO}", *WHOLE)))
            stored.append(values)
        return asked.rounding(stored)

    def _make(self, span: Span, pieces: Pieces) -> Any:
        setup = self.setup
        shape = (span.stop - span.start, self.shape[1])
        if span.form == "float_weight":
            return make_float_weight(setup, shape, self.IS_TABLE)
        more = {} if span.rounding is None else {"rounding": span.rounding}
        return kernel_of(setup, span.form, span.rounding)(
            shape,
            getattr(torch, setup.dtype),
            setup.device,
            is_table=self.IS_TABLE,
            cache=self._cache_entry(span, shape, pieces),
            **more,
        )

    def _fill(self, span: Span, pieces: Pieces) -> None:
        for part, reader in span.readers.items():
            if span.rounding is not None and span.rounding != self._rounding(part, pieces):
                raise ModelError(
                    f"a reload must not change {SCALE} of {module_of(part)}: load the checkpoint "
                    "in a new engine"
                )
            rows = self._read(part, reader, pieces)
            start = part.rows[0] - span.start
            if span.form == "float_weight":
                span.op.plain()[start : part.rows[1] - span.start] = (
                    rows if isinstance(rows, Tensor) else rows.dense()
                )
            elif isinstance(rows, FORMS[span.form]):
                span.op.write(start, rows)
            else:
                raise ModelError(
                    f"{part.name} comes in another form than it was first loaded in; load it in a "
                    "new engine"
                )
        span.op.finish()

    def _read(self, part: Part, reader: Reader, pieces: Pieces) -> Blocks | FloatCodes | Tensor:
        cut = part.cut
        if cut is None:
            return reader.read(part, self.shape[1], pieces)
        piece = pieces.get(part.name)
        if piece is not None and isinstance(piece.data, memoryview):  # rows of bytes
            row_bytes = len(piece.data) // cut.shape[0]
            start, stop = cut.rows
            data = piece.data[start * row_bytes : stop * row_bytes]
            shape = (stop - start, cut.shape[1])
            pieces = {**pieces, part.name: dataclasses.replace(piece, data=data, shape=shape)}
            cut = Cut(shape, (0, shape[0]), cut.columns)
        rows = reader.read(Part(part.name, (0, cut.shape[0])), cut.shape[1], pieces)
        return cut_out(rows, cut, part.name)

    def _cache_entry(
        self, span: Span, shape: tuple[int, int], pieces: Pieces
    ) -> RepackEntry | None:
        cache = self.setup.repack_cache
        if cache is None:
            return None
        parts = [
            [part.name, *part.rows, *_cut_key(part), *reader.key(self._source(part)[0], pieces)]
            for part, reader in span.readers.items()
        ]
        return cache.entry(self.path, [shape, self.IS_TABLE, parts])

    def weight(self, start: int = 0, stop: int | None = None) -> Any:
        """Return what holds the matrix, or the rows [start, stop): an op, or ops that are composed.
        It exists after the first `finish`."""
        assert self.spans, "call finish() before the weight is used"
        spans = [
            span
            for span in self.spans
            if start <= span.start and (stop is None or span.stop <= stop)
        ]
        held = [
            span.op if span.transform is None else Transformed(span.op, span.transform)
            for span in spans
        ]
        return held[0] if len(held) == 1 else SideBySide(held)

    def bind(self, kernels: Kernels) -> Bound:
        return self.weight().bind()

    def bind_experts(self, kernels: Kernels, num_experts: int, bias: Tensor | None) -> BoundExperts:
        if len(self.spans) == 1:
            call: BoundExperts = self.weight().bind_experts(num_experts, bias)
            return call
        rows = self.shape[0] // num_experts
        return one_by_one(
            [self.weight(start, start + rows).bind() for start in range(0, self.shape[0], rows)],
            rows,
            bias,
        )

    def expert_memory(self, num_experts: int) -> ExpertMemory | None:
        """See `MovableExpertsMethod`. Experts whose parts are held side by side, or whose
        activations are transformed, stay."""
        if len(self.spans) > 1 or self.spans[0].transform is not None:
            return None
        memory: ExpertMemory | None = self.spans[0].op.expert_memory(num_experts)
        return memory

    def dequantize(self) -> Tensor:
        return self.weight().dense().float()

    def tensors(self) -> list[Tensor]:
        return list(self.weight().tensors())


def _are_alike(one: Span, other: Span) -> bool:
    """Return whether one op can hold both."""
    return (
        one.form == other.form
        and one.rounding == other.rounding
        and are_equal(one.transform, other.transform)
    )


def _cut_key(part: Part) -> list[object]:
    cut = part.cut
    return [] if cut is None else [[*cut.shape, *cut.rows, *cut.columns]]


class StoredTable(StoredWeight):
    """An embedding table. The same matrix may also be the output head."""

    IS_TABLE = True

    def bind(self, kernels: Kernels) -> Bound:
        return self.weight().bind_lookup()

    def bind_head(self, kernels: Kernels) -> Bound:
        return self.weight().bind()
