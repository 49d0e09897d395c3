"""Layers that only the models of this package need: other norms, tensors with another order of
rows, position biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pegboard.errors import ModelError
from pegboard.interfaces.weight_loader import WantedWeight, WeightPiece
from pegboard.layers import (
    Attention,
    Build,
    Experts,
    Head,
    Layer,
    LayerNorm,
    Linear,
    Norm,
    QKVLinear,
    Rope,
    Rotation,
)
from pegboard.layers.build import Holder, PlainTensor
from pegboard_model_dense.traits import LayerTraits, Traits

ALIBI_CHANNELS = 8
"""Channels that a position bias adds to each head. Two are used; attention kernels need multiples
of 8."""


class AdjustedNorm(Norm):
    """A Norm with the weight (w + offset) · factor, kept as float32, so that it is not rounded.
    Gemma's checkpoints store the weight minus an offset. The last norm takes the factor of the
    logits. The tensor may be called "scale" (Grok)."""

    def __init__(self, build: Build, size: int, eps: float, offset: float, factor: float) -> None:
        super().__init__(build, size, eps)
        self.offset = offset
        self.factor = factor

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        names = [f"{self.build.path}.{part}" for part in ("weight", "scale")]
        name = next((name for name in names if name in available), names[0])
        self.weight = PlainTensor(
            {name: (0, self.size)}, (self.size,), replace(self.build, dtype="float32")
        )
        return [WantedWeight(name, (self.size,))]

    def accept(self, piece: WeightPiece) -> None:
        data = (
            (piece.data.float() + self.offset) * self.factor
            if isinstance(piece.data, Tensor)
            else piece.data
        )
        super().accept(replace(piece, data=data))


class StoredLayerNorm(LayerNorm):
    """A LayerNorm of a kind that `Traits.norm` names. With "layer+1", the checkpoint stores the
    weight minus 1, and the sum is kept as float32, so that it is not rounded."""

    def __init__(self, build: Build, size: int, eps: float, kind: str) -> None:
        self.offset = 1.0 if kind == "layer+1" else 0.0
        own = replace(build, dtype="float32") if self.offset else build
        super().__init__(
            own,
            size,
            eps,
            has_weight=kind != "layer, no weight",
            has_bias=kind in ("layer", "layer+1"),
        )

    def accept(self, piece: WeightPiece) -> None:
        if self.offset and piece.name.endswith(".weight") and isinstance(piece.data, Tensor):
            piece = replace(piece, data=piece.data.float() + self.offset)
        super().accept(piece)


class HeadsNorm(Norm):
    """(x [T, heads, D]) → each head divided by its deviation from its mean, and multiplied with a
    weight of its own [heads, D] (Cohere)."""

    def __init__(self, build: Build, heads: int, head_dim: int, eps: float) -> None:
        super().__init__(build, head_dim, eps)
        self.heads = heads

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        name = f"{self.build.path}.weight"
        self.weight = PlainTensor({name: (0, self.heads)}, (self.heads, self.size), self.build)
        return [WantedWeight(name, (self.heads, self.size))]

    def bind(self) -> None:
        factors = self.weight.data.flatten()
        eps = self.eps
        layer_norm = self.build.kernels["layer_norm"]
        ones = torch.ones(self.size, dtype=factors.dtype, device=factors.device)

        def forward(x: Tensor) -> Tensor:
            return (layer_norm(x, ones, None, eps).flatten(1) * factors).view(x.shape)

        self.forward = forward


def make_norm(
    build: Build,
    size: int,
    traits: Traits,
    scale: float = 1.0,
    factor: float = 1.0,
    *,
    offset: float = 1.0,
) -> Norm:
    """Return a norm of the traits' kind. scale: the input is the paper's, divided by this. factor:
    multiplies the results (root-mean-square norms only). offset: is added to the weight of
    "rms+1"."""
    if not traits.norm.startswith("rms"):
        return StoredLayerNorm(build, size, traits.eps, traits.norm)
    eps = traits.eps / scale**2
    if traits.norm == "rms" and factor == 1.0:
        return Norm(build, size, eps)
    return AdjustedNorm(build, size, eps, offset if traits.norm == "rms+1" else 0.0, factor)


class Rotate(Layer):
    """(x [T, heads, D], rotation) → x with its channels rotated, for models that normalize what was
    rotated. Otherwise `Attention` rotates. Recordings rotate only within attention, so such a model
    is not recorded."""

    def __init__(self, build: Build, rope: Rope) -> None:
        super().__init__(build)
        self.pairs = rope.pairs

    def bind(self) -> None:
        rope = self.build.kernels["rope"]
        pairs = self.pairs

        def forward(x: Tensor, rotation: Rotation) -> Tensor:
            rotated: Tensor = rope(x, *rotation, pairs)
            return rotated

        self.forward = forward


class XIELU(Layer):
    """(x [T, n]) → αp · x² + β · x for positive x, and αn · (exp(x) - 1 - x) + β · x for others
    (Huang and Schlag 2024). The checkpoint has numbers from which αp = softplus(alpha_p) and αn = β
    + softplus(alpha_n) follow, at build.path. It may have β, which is 0.5 otherwise. given:
    alpha_p, alpha_n and β, if the config has them; None = they are tensors."""

    def __init__(self, build: Build, size: int, given: tuple[float, ...] | None) -> None:
        super().__init__(build)
        self.given = given
        self.numbers: dict[str, PlainTensor] = {}
        self.factors = torch.ones(3, size, device=build.device)

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        if self.given is not None:
            return []
        names = [f"{self.build.path}.{name}" for name in ("alpha_p", "alpha_n", "beta")]
        self.numbers = {
            name: PlainTensor({name: (0, 1)}, (1,), self.build, "float32") for name in names
        }
        self.numbers[names[2]].data.fill_(0.5)
        found = names if names[2] in available else names[:2]
        return [WantedWeight(name, None if available else (1,)) for name in found]

    def accept(self, piece: WeightPiece) -> None:
        if isinstance(piece.data, Tensor) and piece.data.dim() == 0:
            piece = replace(piece, shape=(1,), data=piece.data.view(1))
        self.numbers[piece.name].accept(piece)

    def finish(self) -> None:
        loaded = [tensor.data for tensor in self.numbers.values()]
        of_positive, of_negative, beta = loaded or torch.tensor(
            self.given, device=self.factors.device
        )
        alpha_n = beta + functional.softplus(of_negative)
        for factors, number in zip(
            self.factors, (functional.softplus(of_positive), alpha_n, beta - alpha_n), strict=True
        ):
            factors.copy_(number.expand_as(factors))

    def bind(self) -> None:
        if self.given is not None:
            self.finish()
        alpha_p, alpha_n, line = self.factors

        def forward(x: Tensor) -> Tensor:
            """For x ≤ 0, elu(x) is exp(x) - 1; for others, elu(x) - x is 0. In float32, because the
            difference is small."""
            wide = x.float()
            mixed = (
                functional.relu(wide).square() * alpha_p
                + functional.elu(wide) * alpha_n
                + wide * line
            )
            return mixed.to(x.dtype)

        self.forward = forward

    def holders(self) -> list[Holder]:
        return [*self.numbers.values(), *super().holders()]


class FlatExperts(Experts):
    """Experts whose correction may be stored as [1, E] (Ernie), and whose matrices may be below
    each other as [E · F, hidden], the last one transposed (DBRX)."""

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        stacked = dict(available)
        for name in (f"{self.build.path}.{each}" for each in self.names):
            if name in stacked and len(stacked[name].shape) == 2:
                stacked[name] = replace(stacked[name], shape=self._stacked(name))
        found = []
        for each in super().declare(stacked):
            is_correction = each.name == self.correction_name and available
            changed = stacked.get(each.name) is not available.get(each.name)
            shape = None if is_correction else available[each.name].shape if changed else each.shape
            found.append(WantedWeight(each.name, shape))
        return found

    def _stacked(self, name: str) -> tuple[int, int, int]:
        is_last = name.endswith(f".{self.names[-1]}")
        sizes = (
            (self.hidden_size, self.intermediate_size)
            if is_last
            else (self.intermediate_size, self.hidden_size)
        )
        return self.num_experts, *sizes

    def accept(self, piece: WeightPiece) -> None:
        if isinstance(piece.data, Tensor):
            if piece.name == self.correction_name:
                piece = replace(piece, data=piece.data.flatten())
            elif (
                piece.data.dim() == 2
                and piece.name.removeprefix(f"{self.build.path}.") in self.names
            ):
                data = self._unfolded(piece)
                piece = replace(piece, shape=tuple(data.shape), data=data)
        super().accept(piece)

    def _unfolded(self, piece: WeightPiece) -> Tensor:
        """Return [E · F, hidden] as a stack of the experts' matrices. Raises ModelError if the
        sizes do not fit."""
        count = self.num_experts
        rows = self.intermediate_size
        columns = self.hidden_size
        if tuple(piece.shape) != (count * rows, columns):
            told = f"has shape {list(piece.shape)}; {count} experts need {[count * rows, columns]}"
            raise ModelError(f"tensor {piece.name} {told}")
        data: Tensor = piece.data.view(count, rows, columns)
        return data.transpose(1, 2) if piece.name.endswith(f".{self.names[-1]}") else data


class Rows:
    """How a checkpoint's tensor becomes the one that a layer needs. order: the checkpoint's row of
    each row; None = its own. transposed: the matrix is stored [in, out]."""

    def __init__(self, order: Tensor | None, transposed: bool) -> None:
        self.order = order
        self.transposed = transposed

    @property
    def is_plain(self) -> bool:
        return self.order is None and not self.transposed

    def check(self, build: Build) -> None:
        if build.lora is not None and not self.is_plain:
            raise ModelError(
                f"{build.path}: adapters are not supported for matrices that the checkpoint "
                "stores in another order"
            )

    def wanted(
        self, weights: list[WantedWeight], available: Mapping[str, Any]
    ) -> list[WantedWeight]:
        """Return the weights without their shapes if the checkpoint stores them transposed."""
        if not (self.transposed and available):
            return weights
        return [WantedWeight(weight.name) for weight in weights]

    def arranged(self, piece: WeightPiece, in_features: int, out_features: int) -> WeightPiece:
        """Return the piece as [out_features, in_features]. Rows of blocks (GGUF) are moved as they
        are. Raises ModelError if the piece is quantized otherwise, or transposed."""
        if self.is_plain:
            return piece
        data = piece.data
        if (
            self.order is not None
            and not self.transposed
            and not isinstance(data, Tensor)
            and piece.shape[0] == len(self.order)
        ):
            rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(self.order), -1)
            return replace(piece, data=memoryview(rows[self.order].flatten().numpy()))
        if not isinstance(data, Tensor) or not piece.name.endswith((".weight", ".bias")):
            raise ModelError(
                f"tensor {piece.name} is stored as {piece.stored}. This architecture stores the "
                "rows in an order that can be changed only for plain types and those of GGUF; "
                "use a checkpoint that is not quantized"
            )
        if self.transposed and tuple(data.shape) == (in_features, out_features):
            data = data.T
        if self.order is not None and data.shape[0] == len(self.order):
            data = data[self.order]
        return replace(piece, shape=tuple(data.shape), data=data.contiguous())


class ArrangedLinear(Linear):
    """A Linear whose tensors are stored as `rows` says."""

    def __init__(
        self, build: Build, in_features: int, out_features: int, rows: Rows, **more: Any
    ) -> None:
        super().__init__(build, in_features, out_features, **more)
        self.rows = rows
        rows.check(build)

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        return self.rows.wanted(super().declare(available), available)

    def accept(self, piece: WeightPiece) -> None:
        own = self.modules_by_name.get(piece.name.rpartition(".")[0], self.out_features)
        super().accept(self.rows.arranged(piece, self.in_features, own))


class Limited(Linear):
    """A Linear whose results are limited to ±limit. None = they are not."""

    limit: float | None = None

    def bind(self) -> None:
        super().bind()
        if self.limit is not None:
            project = self.forward
            limit = self.limit
            self.forward = lambda x: project(x).clamp(-limit, limit)


class ArrangedQKV(QKVLinear, Limited):
    """The projections of queries, keys and values, stored as one, two (Q, and K with V) or three
    tensors."""

    def __init__(self, build: Build, traits: Traits, num_kv_heads: int) -> None:
        heads = traits.num_heads
        dim = traits.head_dim
        names = traits.names.qkv
        super().__init__(build, traits.hidden_size, heads, num_kv_heads, dim, bias=traits.qkv_bias)
        self.limit = traits.qkv_limit
        counts = {
            1: (heads + 2 * num_kv_heads,),
            2: (heads, 2 * num_kv_heads),
            3: (heads, num_kv_heads, num_kv_heads),
        }[len(names)]
        self.modules_by_name = {
            f"{build.path}.{name}": n * dim for name, n in zip(names, counts, strict=True)
        }
        order = None
        if traits.row_order == "groups":
            of_heads = torch.arange(counts[0]).view(num_kv_heads, -1)
            order = torch.cat([of_heads[:, :-2].reshape(-1), of_heads[:, -2], of_heads[:, -1]])
        elif traits.row_order == "kv heads":
            order = torch.arange(counts[1]).view(num_kv_heads, 2).T.reshape(-1)
        if order is not None:
            order = (order[:, None] * dim + torch.arange(dim)).reshape(-1)
        self.changed = f"{build.path}.{names[-1]}"
        self.rows = Rows(order, traits.transposed)
        self.plain_rows = Rows(None, traits.transposed)
        self.rows.check(build)

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        return self.rows.wanted(super().declare(available), available)

    def accept(self, piece: WeightPiece) -> None:
        module = piece.name.rpartition(".")[0]
        rows = self.rows if module == self.changed else self.plain_rows
        super().accept(rows.arranged(piece, self.in_features, self.modules_by_name.get(module, 0)))


class NormalizedHead(Head):
    """A head whose rows are divided by their lengths when they are loaded (Baichuan 2)."""

    def accept(self, piece: WeightPiece) -> None:
        if not isinstance(piece.data, Tensor):
            raise ModelError(
                f"tensor {piece.name} is stored as {piece.stored}; a head that is normalized must "
                "have a plain type"
            )
        super().accept(replace(piece, data=functional.normalize(piece.data.float())))


class Positions(Layer):
    """(positions [T]) → [T, hidden], a learned vector for each position."""

    def __init__(self, build: Build, traits: Traits) -> None:
        super().__init__(build)
        self.first = traits.first_position
        self.shape = (traits.first_position + traits.max_positions, traits.hidden_size)

    def declare(self, available: Mapping[str, Any]) -> list[WantedWeight]:
        name = f"{self.build.path}.weight"
        self.table = PlainTensor({name: (0, self.shape[0])}, self.shape, self.build)
        return [WantedWeight(name, self.shape)]

    def accept(self, piece: WeightPiece) -> None:
        self.table.accept(piece)

    def bind(self) -> None:
        table = self.table.data[self.first :]
        self.forward = lambda positions: table[positions]


class Places(Layer):
    """(positions [T]) → [T, 4], what keys and queries with position biases hold: the position's
    whole multiples of 256, the rest, 1 and 0. Taken from a table, so that it can be recorded."""

    def __init__(self, build: Build, max_positions: int) -> None:
        super().__init__(build)
        self.length = max_positions if build.max_positions is None else build.max_positions

    def bind(self) -> None:
        positions = torch.arange(self.length, device=self.build.device)
        columns = (
            positions // 256,
            positions % 256,
            torch.ones_like(positions),
            torch.zeros_like(positions),
        )
        table = torch.stack(columns, 1).to(getattr(torch, self.build.dtype))
        self.forward = lambda positions: table[positions]


class AlibiAttention(Attention):
    """Attention with linear biases (Press et al. 2022): each head adds slope · (position of the key
    − its own) to its scores.

    The bias is a part of the product q·k: two more channels of the key hold its position, and those
    of the query the slope. A query's own position adds the same to all of its scores, which the
    softmax ignores. A position is stored as two numbers below 256, which every float type stores
    exactly. Any attention backend can therefore be used, but not a cache of integers or of 8-bit
    floats. Called with the step's `Places` instead of a rotation.
    """

    def __init__(self, build: Build, layer_index: int, traits: Traits, own: LayerTraits) -> None:
        self.scale = traits.head_dim**-0.5 if own.scale is None else own.scale
        self.head_dim = traits.head_dim
        self.slopes = traits.alibi
        padded = traits.head_dim + ALIBI_CHANNELS
        super().__init__(
            build,
            layer_index,
            traits.num_heads,
            own.num_kv_heads,
            padded,
            scale=self.scale,
            exact_keys=True,
        )

    def bind(self) -> None:
        attend = self.build.attention[self.spec.layer_index]
        device = self.build.device
        num_heads = self.spec.num_heads
        num_kv_heads = self.spec.num_kv_heads
        head_dim = self.head_dim

        def widened(count: int, first: int, second: int) -> Tensor:
            """Return which columns of heads [T, count · D] and places make up the wider heads."""
            own = torch.arange(count * head_dim).view(count, -1)
            extra = torch.full((count, ALIBI_CHANNELS), 3)
            extra[:, 0] = first
            extra[:, 1] = second
            return torch.cat([own, extra + count * head_dim], 1).flatten().to(device)

        of_query = widened(num_heads, 2, 2)
        of_key = widened(num_kv_heads, 0, 1)
        of_value = widened(num_kv_heads, 3, 3)
        slopes = (
            torch.tensor(self.slopes, dtype=getattr(torch, self.build.dtype), device=device)
            / self.scale
        )
        factors = torch.ones(
            num_heads, head_dim + ALIBI_CHANNELS, dtype=slopes.dtype, device=device
        )
        factors[:, head_dim] = slopes * 256
        factors[:, head_dim + 1] = slopes
        factors = factors.flatten()
        of_result = (
            torch.arange(factors.numel(), device=device).view(num_heads, -1)[:, :head_dim].flatten()
        )

        def wide(x: Tensor, places: Tensor, order: Tensor, factors: Tensor | None = None) -> Tensor:
            taken = torch.cat([x.flatten(1), places], 1).index_select(1, order)
            return (taken if factors is None else taken * factors).view(len(x), x.shape[1], -1)

        def forward(q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> Tensor:
            wide_q = wide(q, places, of_query, factors)
            out: Tensor = attend(wide_q, wide(k, places, of_key), wide(v, places, of_value))
            return out.index_select(1, of_result)

        self.forward = forward


def alibi_slopes(num_heads: int, largest: float = 8.0) -> tuple[float, ...]:
    """Return the slope of each head: 2^(-largest · i / n). If the number of heads is not a power of
    two, n is the next smaller one, and the other heads have those between, as the paper's authors
    do."""
    power = 1 << (num_heads.bit_length() - 1)
    first = [2.0 ** (-largest * (i + 1) / power) for i in range(power)]
    between = [2.0 ** (-largest * (2 * i + 1) / (2 * power)) for i in range(num_heads - power)]
    return (*first, *between)
