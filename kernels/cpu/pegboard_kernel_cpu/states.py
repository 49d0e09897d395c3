"""Layers with one state per request. The kernels update the states in their blocks."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int64, c_void_p
from typing import Any

from torch import Tensor

from pegboard.ops import StateRows
from pegboard_kernel_cpu.structures import Quantized
from pegboard_kernel_cpu.values import Call, new, rows_of, submit


class Rows(Structure):
    _fields_ = (
        ("table", c_void_p),
        ("table_stride", c_int64),
        ("seq_lens", c_void_p),
        ("starts", c_void_p),
    )


class CausalConv(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("rows", Rows),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("state", c_void_p),
        ("state_stride", c_int64),
        ("channels", c_int64),
        ("width", c_int64),
        ("activates", c_int64),
    )


class SelectiveScan(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("steps", c_void_p),
        ("x_stride", c_int64),
        ("steps_stride", c_int64),
        ("b", c_void_p),
        ("c", c_void_p),
        ("b_stride", c_int64),
        ("c_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("rows", Rows),
        ("a_log", c_void_p),
        ("skip", c_void_p),
        ("state", c_void_p),
        ("state_stride", c_int64),
        ("channels", c_int64),
        ("size", c_int64),
    )


class ChunkedScan(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("steps", c_void_p),
        ("steps_stride", c_int64),
        ("b", c_void_p),
        ("c", c_void_p),
        ("b_stride", c_int64),
        ("c_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("rows", Rows),
        ("bias", c_void_p),
        ("a_log", c_void_p),
        ("skip", c_void_p),
        ("state", c_void_p),
        ("state_stride", c_int64),
        ("heads", c_int64),
        ("head_dim", c_int64),
        ("groups", c_int64),
        ("size", c_int64),
        ("least", c_float),
        ("most", c_float),
    )


class DeltaRule(Structure):
    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("q_stride", c_int64),
        ("k_stride", c_int64),
        ("v", c_void_p),
        ("v_stride", c_int64),
        ("steps", c_void_p),
        ("steps_stride", c_int64),
        ("beta", c_void_p),
        ("beta_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("rows", Rows),
        ("bias", c_void_p),
        ("a_log", c_void_p),
        ("state", c_void_p),
        ("state_stride", c_int64),
        ("heads", c_int64),
        ("head_dim", c_int64),
        ("groups", c_int64),
        ("size", c_int64),
        ("decays", c_int64),
    )


class GatedNorm(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("gate", c_void_p),
        ("x_stride", c_int64),
        ("gate_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("to", Quantized),
        ("weight", c_void_p),
        ("columns", c_int64),
        ("size", c_int64),
        ("weights", c_int64),
        ("gates_first", c_int64),
        ("epsilon", c_float),
    )


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateRows, activates: bool
) -> Tensor:
    """x [T, C] → [T, C]."""
    x = rows_of(x)
    out = new(x, x.shape[1])
    (channels, width) = weight.shape
    arguments = CausalConv(
        **_memory(state, rows, weight=weight, bias=bias),
        channels=channels,
        width=width,
        activates=activates,
    )
    submit(x, Call("causal_conv", arguments, {"x": x}, {"out": out}, (weight, bias, state, rows)))
    return out


def selective_scan(
    x: Tensor,
    steps: Tensor,
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    state: Tensor,
    rows: StateRows,
) -> Tensor:
    """x [T, D] → [T, D]."""
    reads = {"x": rows_of(x), "steps": rows_of(steps), "b": rows_of(b), "c": rows_of(c)}
    out = new(reads["x"], x.shape[1])
    (channels, size) = a_log.shape
    arguments = SelectiveScan(
        **_memory(state, rows, a_log=a_log, skip=skip), channels=channels, size=size
    )
    submit(
        reads["x"],
        Call("selective_scan", arguments, reads, {"out": out}, (a_log, skip, state, rows)),
    )
    return out


def chunked_scan(
    x: Tensor,
    steps: Tensor,
    bias: Tensor,
    limits: tuple[float, float],
    a_log: Tensor,
    b: Tensor,
    c: Tensor,
    skip: Tensor,
    state: Tensor,
    rows: StateRows,
) -> Tensor:
    """x [T, H, P] → [T, H, P]."""
    reads = {"x": rows_of(x), "steps": rows_of(steps), "b": rows_of(b), "c": rows_of(c)}
    out = new(reads["x"], reads["x"].shape[1])
    (_, heads, head_dim, size) = state.shape
    arguments = ChunkedScan(
        **_memory(state, rows, bias=bias, a_log=a_log, skip=skip),
        heads=heads,
        head_dim=head_dim,
        groups=b.shape[1],
        size=size,
        least=limits[0],
        most=limits[1],
    )
    submit(
        reads["x"],
        Call("chunked_scan", arguments, reads, {"out": out}, (bias, a_log, skip, state, rows)),
    )
    return out.view(x.shape)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    steps: Tensor,
    bias: Tensor,
    a_log: Tensor,
    beta: Tensor,
    state: Tensor,
    rows: StateRows,
) -> Tensor:
    """v [T, H, P] → [T, H, P]."""
    given = {"q": q, "k": k, "v": v, "steps": steps, "beta": beta}
    reads = {name: rows_of(value) for name, value in given.items()}
    out = new(reads["v"], reads["v"].shape[1])
    (_, heads, head_dim, size) = state.shape
    arguments = DeltaRule(
        **_memory(state, rows, bias=bias, a_log=a_log),
        heads=heads,
        head_dim=head_dim,
        groups=q.shape[1],
        size=size,
        decays=bias.numel() // heads,
    )
    submit(
        reads["v"],
        Call("gated_delta_rule", arguments, reads, {"out": out}, (bias, a_log, state, rows)),
    )
    return out.view(v.shape)


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, size: int, gates_first: bool
) -> Tensor:
    """x, gate [T, n] → [T, n]."""
    reads = {"x": rows_of(x), "gate": rows_of(gate)}
    out = new(reads["x"], x.shape[1])
    arguments = GatedNorm(
        weight=None if weight is None else weight.data_ptr(),
        columns=x.shape[1],
        size=size,
        weights=0 if weight is None else len(weight),
        gates_first=gates_first,
        epsilon=eps,
    )
    submit(reads["x"], Call("gated_norm", arguments, reads, {"out": out}, weight))
    return out


def _memory(state: Tensor, rows: StateRows, **weights: Tensor | None) -> dict[str, Any]:
    """Return the fields that point to memory outside the step's activations. Weights are
    contiguous."""
    places = Rows(
        rows.table.data_ptr(),
        rows.table.stride(0),
        rows.seq_lens.data_ptr(),
        rows.query_start_loc.data_ptr(),
    )
    pointers = {
        name: None if weight is None else weight.data_ptr() for name, weight in weights.items()
    }
    return {"rows": places, "state": state.data_ptr(), "state_stride": state.stride(0), **pointers}
