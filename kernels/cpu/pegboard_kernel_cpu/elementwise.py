"""Norms and gated activations: eager calls and their recorded form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pegboard_kernel_cpu.library import library
from pegboard_kernel_cpu.recorder import NativeRecorder, Value
from pegboard_kernel_cpu.structures import GatedActivation, RMSNorm


def rows_of(x: Tensor) -> Tensor:
    """x [T, …] as float32 [T, n] whose rows are contiguous; a view where possible."""
    flat = x.reshape(x.shape[0], -1)
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()


class NormKernel:
    """rms_norm: (x, weight, eps) → x normalized over the last dimension; adjacent heads are normalized separately."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, out = rows_of(x), torch.empty(x.shape)
        arguments = _norm_arguments(weight, eps, rows.shape[1])
        arguments.x, arguments.x_stride = rows.data_ptr(), rows.stride(0)
        arguments.out, arguments.out_stride = out.data_ptr(), rows.shape[1]
        library().team_run([("rms_norm", arguments)], rows.shape[0])
        return out

    def record(self, recorder: NativeRecorder, x: Value, weight: Tensor, eps: float) -> Value:
        out = recorder.value(x.width)
        recorder.keep.append(weight)
        recorder.emit("rms_norm", _norm_arguments(weight, eps, x.width), {"x": x}, {"out": out})
        return out


class AddNormKernel:
    """add_rms_norm: (x, residual, weight, eps) → (normalized sum, sum); the sum overwrites the residual."""

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rows, out = rows_of(x), torch.empty(x.shape)
        arguments = _norm_arguments(weight, eps, rows.shape[1])
        arguments.x, arguments.x_stride = rows.data_ptr(), rows.stride(0)
        arguments.residual, arguments.residual_stride = residual.data_ptr(), residual.stride(0)
        arguments.out, arguments.out_stride = out.data_ptr(), rows.shape[1]
        library().team_run([("rms_norm", arguments)], rows.shape[0])
        return out, residual

    def record(self, recorder: NativeRecorder, x: Value, residual: Value, weight: Tensor, eps: float) -> tuple[Value, Value]:
        out = recorder.value(x.width)
        recorder.keep.append(weight)
        arguments = _norm_arguments(weight, eps, x.width)
        recorder.emit("rms_norm", arguments, {"x": x, "residual": residual}, {"out": out, "residual": residual})
        return out, residual


def _norm_arguments(weight: Tensor, eps: float, width: int) -> RMSNorm:
    columns = weight.shape[0]
    return RMSNorm(weight=weight.data_ptr(), columns=columns, parts=width // columns, epsilon=eps)


class ActivationKernel:
    """silu_mul and gelu_tanh_mul: [T, 2F] → [T, F]."""

    def __init__(self, is_gelu: bool) -> None:
        self.is_gelu = is_gelu

    def __call__(self, x: Tensor) -> Tensor:
        rows = rows_of(x)
        columns = rows.shape[1] // 2
        out = torch.empty(rows.shape[0], columns)
        arguments: Any = GatedActivation(columns=columns, is_gelu=self.is_gelu)
        arguments.x, arguments.x_stride, arguments.out, arguments.out_stride = (
            rows.data_ptr(),
            rows.stride(0),
            out.data_ptr(),
            columns,
        )
        library().team_run([("gated_activation", arguments)], rows.shape[0])
        return out

    def record(self, recorder: NativeRecorder, x: Value) -> Value:
        out = recorder.value(x.width // 2)
        arguments = GatedActivation(columns=out.width, is_gelu=self.is_gelu)
        recorder.emit("gated_activation", arguments, {"x": x}, {"out": out})
        return out


rms_norm = NormKernel()
add_rms_norm = AddNormKernel()
silu_mul = ActivationKernel(is_gelu=False)
gelu_tanh_mul = ActivationKernel(is_gelu=True)
