"""Triton kernels on the fake GPU: Triton's interpreter computes with the device's memory, and
captures record launches.

    with FakeGPU() as gpu, triton_on_fake_gpu():
        …

A launch in a capture is written down with the addresses and numbers that it was given, as in a
captured graph. A replay launches it again with these, whatever the host has computed since.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from pegboard_testing.fake_gpu import DeviceTensor, FakeGPU, Tape


def corrected_products() -> Callable[..., Any]:
    """Return `InterpreterBuilder.create_dot` without a mistake of Triton 3.9. The interpreter keeps
    bfloat16 numbers as 16-bit integers, and its matrix products multiply these integers. Here they
    are widened first. Each row is multiplied alone, because numpy rounds a row of a product
    according to its place, which GPUs do not."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, total: Any, *rest: Any) -> Any:
        a, b = (
            self.create_fp_ext(part, tl.float32) if part.dtype.scalar == tl.bfloat16 else part
            for part in (a, b)
        )
        rows, totals = (TensorHandle(x.data[..., None, :], x.dtype) for x in (a, total))
        products = multiply(self, rows, b, totals, *rest)
        return TensorHandle(products.data[..., 0, :], products.dtype)

    return create_dot


def rounded_casts() -> Callable[..., Any]:
    """Return `InterpreterBuilder.cast_impl` that rounds float32 to the nearest bfloat16, ties to
    the even one, as GPUs do. The interpreter of Triton 3.9 cuts bits off."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        kinds = (src.dtype.scalar, dst_type.scalar)
        if kinds == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(src.data).view(np.uint32).astype(np.uint64)
            nearest = bits + 0x7FFF + ((bits >> 16) & 1)
            codes = np.where(np.isnan(src.data), bits | 0x400000, nearest) >> 16
            return TensorHandle(codes.astype(np.uint16), tl.bfloat16)
        if kinds == (tl.bfloat16, tl.float32):
            bits = np.ascontiguousarray(src.data).view(np.uint16).astype(np.uint32) << 16
            return TensorHandle(bits.view(np.float32), tl.float32)
        return cast(self, src, dst_type)

    return cast_impl


def rounded_float8() -> Callable[..., Any]:
    """Return `InterpreterBuilder.create_fp_to_fp` that rounds float32 to the nearest e4m3fn, ties
    to the even one, as GPUs do. The interpreter of Triton 3.9 loses carries into the exponent."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    convert = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding: Any) -> Any:
        if (src.dtype.scalar, dst_type.scalar) != (tl.float32, tl.float8e4nv):
            return convert(self, src, dst_type, rounding)
        with torch._C.DisableTorchFunction():
            numbers = torch.from_numpy(np.array(src.data)).to(torch.float8_e4m3fn)
            return TensorHandle(numbers.view(torch.uint8).numpy(), tl.float8e4nv)

    return create_fp_to_fp


@contextlib.contextmanager
def triton_on_fake_gpu() -> Iterator[None]:
    """Inside, launches of interpreted kernels need tensors of the fake device. A launch with a
    tensor of the host is an error, as on a GPU. The environment must have had TRITON_INTERPRET=1
    when Triton was imported."""
    from triton.runtime.interpreter import GridExecutor

    interpret = GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        assert FakeGPU.current is not None, "the fake device exists inside `with FakeGPU()`"
        for name, value in [*zip(executor.arg_names, args, strict=False), *kwargs.items()]:
            if isinstance(value, Tensor) and not isinstance(value, DeviceTensor):
                raise ValueError(
                    f"{executor.fn.__name__}: pointer argument {name} cannot be accessed from "
                    "Triton (cpu tensor?)"
                )
        tape = Tape.current
        before = len(tape.calls) if tape is not None else 0
        _run(interpret, executor, args, kwargs)
        if tape is not None:  # what the interpreter itself calls is not part of the launch
            del tape.calls[before:]
            tape.calls.append(
                (
                    lambda *args, **kwargs: _run(interpret, executor, args, kwargs),
                    args,
                    kwargs,
                    None,
                )
            )

    with mock.patch.object(GridExecutor, "__call__", launch):
        yield


def _run(interpret: Callable[..., None], executor: Any, args: Any, kwargs: Any) -> None:
    with torch._C.DisableTorchFunction():
        plain = [
            value.as_subclass(Tensor) if isinstance(value, Tensor) else value for value in args
        ]
        interpret(executor, *plain, **kwargs)
