"""Layers that mix the tokens of a request through a state: Mamba, Mamba-2 and the gated short
convolution of LFM2."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from pegboard.errors import ModelError
from pegboard.interfaces.attention import KVTensor
from pegboard.layers import Build, Linear, Norm, StateLayer
from pegboard.layers.shards import Span, scaled, stacked
from pegboard.ops import StateRows
from pegboard_models.parameters import Parameters
from pegboard_models.short_conv import ShortConv

Normalize = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class MambaShape:
    """inner: channels of the scan. state: numbers per channel. rank: of the step sizes. width: of
    the convolution. norms: what is applied to step sizes, inputs and outputs of the scan; "plain"
    norms have no weights (Falcon-Mamba), "weights" do (Jamba)."""

    hidden: int
    inner: int
    state: int
    rank: int
    width: int
    bias: bool
    conv_bias: bool
    norms: str = ""
    eps: float = 1e-6


class Mamba(nn.Module):
    """[T, hidden] → [T, hidden]: a selective scan over convolved inputs, with a gate (Gu & Dao
    2023, figure 3)."""

    def __init__(self, build: Build, index: int, shape: MambaShape) -> None:
        super().__init__()
        inner = shape.inner
        state = shape.state
        channels = build.tensor.share(inner)
        self.inner = held = channels[1] - channels[0]
        self.shape = shape
        self.scan = build.kernels["selective_scan"]
        self.gated = build.kernels["gated_norm"]
        self.in_proj = Linear(build.at("in_proj"), shape.hidden, 2 * inner, bias=shape.bias)
        self.in_proj.hold({self.in_proj.build.path: [(inner, channels)] * 2})
        self.conv = ShortConv(
            build.at("conv1d"),
            inner,
            shape.width,
            bias=shape.conv_bias,
            activates=True,
            held=[channels],
        )
        self.x_proj = Linear(build.at("x_proj"), inner, shape.rank + 2 * state, split="columns")
        self.dt_proj = Linear(build.at("dt_proj"), shape.rank, inner, bias=True, split="rows")
        self.weights = Parameters(
            build, {"A_log": (inner, state), "D": (inner,)}, "float32", held=[channels]
        )
        self.out_proj = Linear(
            build.at("out_proj"), inner, shape.hidden, bias=shape.bias, split="columns"
        )
        self.norms: list[Normalize] = []
        if shape.norms == "weights":
            sizes = (("dt", shape.rank), ("b", state), ("c", state))
            self.norms = [
                Norm(build.at(f"{name}_layernorm"), size, shape.eps) for name, size in sizes
            ]
        elif shape.norms == "plain":
            rms_norm = build.kernels["rms_norm"]
            self.norms = [
                partial(rms_norm, weight=ones(build, size), eps=shape.eps)
                for size in (shape.rank, state, state)
            ]
        conv = KVTensor("conv", (held, shape.width - 1), build.dtype)
        self.states = StateLayer(build, index, KVTensor("state", (held, state), "float32"), conv)

    def forward(self, hidden: Tensor, rotation: object = None) -> Tensor:
        x, gate = self.in_proj(hidden).chunk(2, -1)
        x = self.states(self._convolved, self.inner, x)
        parts = self.x_proj(x).split((self.shape.rank, self.shape.state, self.shape.state), -1)
        if self.norms:
            parts = tuple(norm(part) for norm, part in zip(self.norms, parts, strict=True))
        steps = self.dt_proj(parts[0])
        y = self.states(self._scanned, self.inner, x, steps, parts[1], parts[2])
        out: Tensor = self.out_proj(self.gated(y, gate, None, 0.0, self.inner, True))
        return out

    def _convolved(self, states: Mapping[str, Tensor], rows: StateRows, x: Tensor) -> Tensor:
        return self.conv(x, states["conv"], rows)

    def _scanned(
        self,
        states: Mapping[str, Tensor],
        rows: StateRows,
        x: Tensor,
        steps: Tensor,
        b: Tensor,
        c: Tensor,
    ) -> Tensor:
        a_log = self.weights["A_log"]
        y: Tensor = self.scan(x, steps, a_log, b, c, self.weights["D"], states["state"], rows)
        return y


@dataclass(frozen=True)
class Mamba2Shape:
    """heads: of head_dim channels each. groups: heads of a group share b and c of the scan. state:
    numbers per channel. width: of the convolution. limits: of the step sizes. norm: the result is
    normalized after it was gated ("after") or before ("before"), or not at all (""). factors: of
    the parts of the first projection (gate, x, b, c, step sizes)."""

    hidden: int
    heads: int
    head_dim: int
    groups: int
    state: int
    width: int
    bias: bool
    conv_bias: bool
    out_bias: bool
    eps: float
    limits: tuple[float, float] = (0.0, float("inf"))
    norm: str = "after"
    factors: Sequence[float] = ()

    def __post_init__(self) -> None:
        if (
            min(self.heads, self.head_dim, self.groups, self.state) < 1
            or self.heads % self.groups
            or self.width < 2
        ):
            raise ModelError(
                f"the checkpoint's config describes no Mamba-2 layer: {self}; heads must be a "
                "multiple of groups"
            )


class Mamba2(nn.Module):
    """[T, hidden] → [T, hidden]: a scan whose heads have one decay each (Dao & Gu 2024, figure
    6)."""

    def __init__(self, build: Build, index: int, shape: Mamba2Shape) -> None:
        super().__init__()
        whole = shape.heads * shape.head_dim
        whole_shared = shape.groups * shape.state
        heads, groups = build.tensor.heads(shape.heads, shape.groups)
        channels = scaled(heads, shape.head_dim)
        mixed = [
            (whole, channels),
            (whole_shared, scaled(groups, shape.state)),
            (whole_shared, scaled(groups, shape.state)),
        ]
        sections = [(whole, channels), *mixed, (shape.heads, heads)]
        counts = [stop - start for _, (start, stop) in sections]
        inner, _, shared, _, self.num_heads = counts
        self.num_groups = groups[1] - groups[0]
        self.shape = shape
        self.scan = build.kernels["chunked_scan"]
        self.gated = gated_norm_of(build, shape.groups, groups)
        self.sizes = (inner, inner + 2 * shared, self.num_heads)
        num_rows = sum(rows for rows, _ in sections)
        self.in_proj = Linear(build.at("in_proj"), shape.hidden, num_rows, bias=shape.bias)
        self.in_proj.hold({self.in_proj.build.path: sections})
        self.conv = ShortConv(
            build.at("conv1d"),
            whole + 2 * whole_shared,
            shape.width,
            bias=shape.conv_bias,
            activates=True,
            held=stacked(mixed),
        )
        self.weights = Parameters(
            build,
            dict.fromkeys(("A_log", "D", "dt_bias"), (shape.heads,)),
            "float32",
            held=[heads],
        )
        self.norm = (
            Parameters(build.at("norm"), {"weight": (whole,)}, held=[channels])
            if shape.norm
            else None
        )
        self.out_proj = Linear(
            build.at("out_proj"),
            whole,
            shape.hidden,
            bias=shape.out_bias,
            split="columns",
            heads=(shape.heads, shape.groups, shape.head_dim),
        )
        repeats = torch.tensor(counts)
        factors = torch.tensor(shape.factors).repeat_interleave(repeats) if shape.factors else None
        self.factors = (
            None if factors is None else factors.to(build.device, getattr(torch, build.dtype))
        )
        tensors = KVTensor("state", (self.num_heads, shape.head_dim, shape.state), "float32")
        self.states = StateLayer(
            build, index, tensors, KVTensor("conv", (self.sizes[1], shape.width - 1), build.dtype)
        )

    def forward(self, hidden: Tensor, rotation: object = None) -> Tensor:
        shape = self.shape
        projected = self.in_proj(hidden)
        if self.factors is not None:
            projected = projected * self.factors
        gate, mixed, steps = projected.split(self.sizes, -1)
        y = self.states(self._scanned, self.sizes[0], mixed, steps)
        weight = None if self.norm is None else self.norm["weight"]
        size = shape.heads // shape.groups * shape.head_dim
        y = self.gated(y, gate, weight, shape.eps, size, shape.norm != "before")
        out: Tensor = self.out_proj(y)
        return out

    def _scanned(
        self, states: Mapping[str, Tensor], rows: StateRows, mixed: Tensor, steps: Tensor
    ) -> Tensor:
        shape = self.shape
        (inner, _, _) = self.sizes
        mixed = self.conv(mixed, states["conv"], rows)
        x = mixed[:, :inner].unflatten(-1, (self.num_heads, shape.head_dim))
        b, c = mixed[:, inner:].unflatten(-1, (2, self.num_groups, shape.state)).unbind(1)
        weights = self.weights
        y: Tensor = self.scan(
            x,
            steps,
            weights["dt_bias"],
            shape.limits,
            weights["A_log"],
            b,
            c,
            weights["D"],
            states["state"],
            rows,
        )
        return y.flatten(1)


class GatedConv(nn.Module):
    """[T, hidden] → [T, hidden]: a short convolution between two gates (Liquid AI 2025, LFM2)."""

    def __init__(self, build: Build, index: int, hidden: int, width: int, bias: bool) -> None:
        super().__init__()
        channels = build.tensor.share(hidden)
        self.in_proj = Linear(build.at("in_proj"), hidden, 3 * hidden, bias=bias)
        self.in_proj.hold({self.in_proj.build.path: [(hidden, channels)] * 3})
        self.conv = ShortConv(
            build.at("conv"), hidden, width, bias=bias, activates=False, held=[channels]
        )
        self.out_proj = Linear(build.at("out_proj"), hidden, hidden, bias=bias, split="columns")
        held = channels[1] - channels[0]
        self.states = StateLayer(build, index, KVTensor("conv", (held, width - 1), build.dtype))

    def forward(self, hidden: Tensor, rotation: object = None) -> Tensor:
        first, last, x = self.in_proj(hidden).chunk(3, -1)
        mixed = self.states(self._convolved, x.shape[1], first * x)
        out: Tensor = self.out_proj(last * mixed)
        return out

    def _convolved(self, states: Mapping[str, Tensor], rows: StateRows, x: Tensor) -> Tensor:
        return self.conv(x, states["conv"], rows)


def gated_norm_of(build: Build, num_groups: int, held: Span) -> Callable[..., Tensor]:
    """Return `state_ops.gated_norm` of the channels that this rank holds. If these are a part of a
    group, the ranks add up their squares. held: the groups of which it holds channels."""
    if build.tensor.size <= num_groups:
        whole: Callable[..., Tensor] = build.kernels["gated_norm"]
        return whole
    add_up = build.tensor.summed(lambda squares: squares)
    column = slice(*held)

    def norm(
        x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, size: int, gates_first: bool
    ) -> Tensor:
        wide = x.float()
        gate = nn.functional.silu(gate.float())
        if weight is None:
            return (wide * gate).to(x.dtype)
        wide = wide * gate if gates_first else wide
        squares = wide.new_zeros(len(wide), num_groups)
        squares[:, column] = wide.square().sum(1, keepdim=True)
        mean = add_up(squares)[:, column] / size
        normalized = wide * torch.rsqrt(mean + eps) * weight.float()
        return (normalized if gates_first else normalized * gate).to(x.dtype)

    return norm


def ones(build: Build, size: int) -> Tensor:
    """Return the weight of a norm that has none, in the compute type."""
    return torch.ones(size, dtype=getattr(torch, build.dtype), device=build.device)
