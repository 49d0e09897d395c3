"""Norms, gated activations, the Hadamard transform and the rotary embedding."""

from __future__ import annotations

from torch import Tensor

from pegboard import ops
from pegboard_kernel_cpu.structures import GatedActivation, Hadamard, LayerNorm, RMSNorm
from pegboard_kernel_cpu.values import Call, Value, new, rows_of, submit


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize over the last dimension. Adjacent heads are normalized one by one."""
    rows = rows_of(x)
    out = new(x, rows.shape[1])
    submit(x, Call("rms_norm", _norm(weight, eps, rows), {"x": rows}, {"out": out}, weight))
    return out if x.dim() == 2 else out.view(x.shape)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (normalized sum, sum). The sum is written to the residual's memory."""
    rows = rows_of(x)
    out = new(x, rows.shape[1])
    reads = {"x": rows, "residual": residual}
    writes = {"out": out, "residual": residual}
    submit(x, Call("rms_norm", _norm(weight, eps, rows), reads, writes, weight))
    return out, residual


def _norm(weight: Tensor, eps: float, rows: Tensor) -> RMSNorm:
    columns = weight.shape[0]
    return RMSNorm(
        weight=weight.data_ptr(), columns=columns, parts=rows.shape[1] // columns, epsilon=eps
    )


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalize over the last dimension. Adjacent heads are normalized one by one."""
    rows = rows_of(x)
    out = new(x, rows.shape[1])
    submit(
        x,
        Call(
            "layer_norm",
            _centred(weight, bias, eps, rows),
            {"x": rows},
            {"out": out},
            (weight, bias),
        ),
    )
    return out if x.dim() == 2 else out.view(x.shape)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (normalized sum, sum). The sum is written to the residual's memory."""
    rows = rows_of(x)
    out = new(x, rows.shape[1])
    reads = {"x": rows, "residual": residual}
    writes = {"out": out, "residual": residual}
    submit(x, Call("layer_norm", _centred(weight, bias, eps, rows), reads, writes, (weight, bias)))
    return out, residual


def _centred(weight: Tensor, bias: Tensor | None, eps: float, rows: Tensor) -> LayerNorm:
    columns = weight.shape[0]
    call = LayerNorm(
        weight=weight.data_ptr(), columns=columns, parts=rows.shape[1] // columns, epsilon=eps
    )
    call.bias = None if bias is None else bias.data_ptr()
    return call


def silu_mul(x: Tensor) -> Tensor:
    """[T, 2F] → [T, F]."""
    return _gated(x, is_gelu=False)


def gelu_tanh_mul(x: Tensor) -> Tensor:
    """[T, 2F] → [T, F]."""
    return _gated(x, is_gelu=True)


def _gated(x: Tensor, is_gelu: bool) -> Tensor:
    rows = rows_of(x)
    columns = rows.shape[1] // 2
    out = new(x, columns)
    submit(
        x,
        Call(
            "gated_activation",
            GatedActivation(columns=columns, is_gelu=is_gelu),
            {"x": rows},
            {"out": out},
        ),
    )
    return out


def hadamard(x: Tensor, size: int) -> Tensor:
    """[T, n] → [T, n]."""
    rows = rows_of(x)
    columns = rows.shape[1]
    out = new(x, columns)
    arguments = Hadamard(columns=columns, size=size)
    submit(x, Call("hadamard", arguments, {"x": rows}, {"out": out}))
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor, pairs: bool) -> Tensor:
    """The same as the reference. When recorded, the rotation becomes a part of the attention that
    takes the result."""
    return (
        x.recorder.turned(x, cos, sin, pairs) if type(x) is Value else ops.rope(x, cos, sin, pairs)
    )
