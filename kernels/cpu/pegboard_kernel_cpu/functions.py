"""Functions of torch that kernels compute, on stand-ins.

One dimension of a stand-in is that of the tokens: [T, n], but also [1, T, n] or [1, heads, T, n],
the shapes that models of transformers compute with. Results are stored token by token, and are
views of the shape that torch would give them. Whatever is not here cannot be recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from pegboard_kernel_cpu import elementwise
from pegboard_kernel_cpu.structures import LookupFloat, Pointwise, RowMeans, TakeColumns
from pegboard_kernel_cpu.values import Call, Value, refusal, submit

KINDS = (
    "mul",
    "add",
    "sub",
    "div",
    "clamp",
    "relu",
    "sigmoid",
    "tanh",
    "silu",
    "gelu",
    "gelu_tanh",
    "elu",
    "rsqrt",
)
"""What the kernel `pointwise` computes, in the order of its kinds."""

Term = Tensor | float
"""An operand: a stand-in, a tensor that is the same for all tokens, or a number."""


def record(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Value:
    """Record a function of torch. Raises CannotRecord if no kernel computes the same."""
    function = FUNCTIONS.get(name) or OF_OTHERS.get(name)
    result = None
    if function is not None and _takes(function, args, kwargs):
        result = function(*args, **kwargs)
    if result is None:
        raise refusal(f"computes {name}")
    return result


def _takes(function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def token_dim(x: Value) -> int | None:
    """Return the dimension of the tokens. None = there is none, because they were mixed."""
    rows = x.recorder.rows
    width = x.buffer.token_bytes // x.element_size()
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        copies = size // rows
        if size == copies * rows and stride * copies == width:
            return dim
    return None


def _by_token(x: Value) -> Value:
    """Return a view [T, …]."""
    token = token_dim(x)
    assert token is not None, "the caller has looked for the tokens"
    return x.movedim(token, 0)  # type: ignore[return-value]


def _result(like: Value, shape: Sequence[int], token: int) -> Value:
    """Return a stand-in of this shape for a new result."""
    others = [size for dim, size in enumerate(shape) if dim != token]
    recorder = like.recorder
    memory = recorder.value(prod(shape) // recorder.rows)
    result: Value = memory.view(shape[token], *others).movedim(0, token)
    return result


def _is_term(x: Any) -> bool:
    return isinstance(x, int | float) or (isinstance(x, Tensor) and x.dtype == torch.float32)


def _pointwise(name: str, x: Term, y: Term | None = None) -> Value | None:
    """Record a function of two terms, or of one. Returns None if it is something else."""
    terms = [term for term in (x, y) if term is not None]
    values: list[Any] = [term for term in terms if type(term) is Value]
    if not all(_is_term(term) for term in terms):
        return None
    shape = torch.broadcast_shapes(*(t.shape for t in terms if isinstance(t, Tensor)))
    tokens = {
        None if (dim := token_dim(value)) is None else dim - value.dim() + len(shape)
        for value in values
    }
    if len(tokens) > 1 or None in tokens:
        return None
    token: Any = tokens.pop()
    others = [term for term in terms if isinstance(term, Tensor) and type(term) is not Value]
    if any(_size_at(tensor, token - len(shape)) > 1 for tensor in others):
        return None
    out = _result(values[0], shape, token)
    return out if _emit(name, out, token, x, y) else None


def _size_at(x: Tensor, dim: int) -> int:
    """Return the size of a dimension, counted from the last one (-1). 1 = it is not there."""
    return x.shape[dim] if -dim <= x.dim() else 1


def _emit(name: str, out: Value, token: int, x: Term, y: Term | None = None) -> bool:
    """Append the call that writes `out`, a stand-in or a part of one. Returns False if the operands
    have too many dimensions for the kernel."""
    if not isinstance(x, Tensor):
        return False
    fields: dict[str, Any] = {"out": out, "x": x}
    if isinstance(y, Tensor):
        fields["y"] = y
    loops = _loops(out.shape, token, [_meta(operand) for operand in fields.values()])
    if loops is None:
        return False
    ((outer, outer_steps), (columns, steps)) = loops
    call = Pointwise(outer=outer, columns=columns, kind=KINDS.index(name))
    reads: dict[str, Tensor] = {}
    held = []
    for field, operand, far, near in zip(fields, fields.values(), outer_steps, steps, strict=True):
        setattr(call, f"{field}_outer", far)
        setattr(call, f"{field}_step", near)
        if type(operand) is Value:
            reads[field] = _by_token(operand)
        else:
            setattr(call, field, operand.data_ptr())
            held.append(operand)
    writes = {"out": reads.pop("out")}
    if y is not None and "y" not in fields:
        call.factor = y
    submit(writes["out"], Call("pointwise", call, reads, writes, held))
    return True


def _meta(x: Tensor) -> Tensor:
    return x.meta if type(x) is Value else x


def _loops(
    shape: Sequence[int], token: int, operands: Sequence[Tensor]
) -> list[tuple[int, list[int]]] | None:
    """Return two loops over the elements of one token: how often each is repeated, and by how many
    elements each operand advances. None = it takes more than two."""
    steps = [operand.expand(shape).stride() for operand in operands]
    loops: list[tuple[int, list[int]]] = []
    for dim, size in enumerate(shape):
        ahead = [step[dim] for step in steps]
        if dim == token or size == 1:
            continue
        if loops and loops[-1][1] == [size * step for step in ahead]:
            loops[-1] = loops[-1][0] * size, ahead
        else:
            loops.append((size, ahead))
    nothing = [0] * len(steps)
    loops = [(1, nothing)] * (2 - len(loops)) + loops
    return loops if len(loops) == 2 else None


def _add(x: Any, y: Any, alpha: float = 1) -> Value | None:
    return _pointwise("add", x, y)


def _sub(x: Any, y: Any, alpha: float = 1) -> Value | None:
    return _pointwise("sub", x, y)


def _add_in_place(x: Any, y: Any, alpha: float = 1) -> Value | None:
    return x if type(x) is Value and x.recorder.add_bias(x, y) else None


def _mul(x: Any, y: Any) -> Value | None:
    return _pointwise("mul", x, y) if isinstance(x, Tensor) else _pointwise("mul", y, x)


def _div(x: Any, y: Any, rounding_mode: None = None) -> Value | None:
    return _pointwise("div", x, y)


def _power(x: Any, exponent: Any) -> Value | None:
    if exponent not in (2, 3):
        return None
    square = _pointwise("mul", x, x)
    return square if exponent == 2 or square is None else _pointwise("mul", square, x)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Value | None:
    if not isinstance(max, int | float) or min != -max or max < 0:
        raise refusal(f"computes clamp from {min!r} to {max!r}")
    return _pointwise("clamp", x, float(max))


def _gelu(x: Any, approximate: str = "none") -> Value | None:
    return _pointwise("gelu_tanh" if approximate == "tanh" else "gelu", x)


def _activation(name: str, x: Any, alpha: float = 1, inplace: bool = False) -> Value | None:
    return _pointwise(name, x) if alpha == 1 and not inplace else None


def _dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Value | None:
    return None if training else x


def _mean(x: Any, dim: Any, keepdim: bool = False) -> Value | None:
    """Record means over the last dimension."""
    token = token_dim(x)
    last = x.dim() - 1
    axis = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if axis not in (-1, last) or token in (None, last) or x.dtype != torch.float32:
        return None
    columns = x.shape[-1]
    loops = _loops((*x.shape[:-1], 1), token, [x.meta[..., :1]])
    if x.stride(-1) != 1 or loops is None or loops[0][0] > 1:
        return None
    ((_, _), (outer, (step,))) = loops
    out = _result(x, (*x.shape[:-1], 1), token)
    call = RowMeans(outer=outer, columns=columns, x_outer=step)
    row = _by_token(out)
    submit(row, Call("row_means", call, {"x": _by_token(x)}, {"out": row}))
    return out if keepdim else out[..., 0]  # type: ignore[return-value]


def _norm(
    kernel: Callable[..., Tensor], x: Any, shape: Any, weight: Any, *more: Any
) -> Value | None:
    """Record a norm over the last dimension."""
    if tuple(shape) != tuple(x.shape[-1:]) or not isinstance(weight, Tensor):
        return None
    if not weight.is_contiguous():
        return None
    token = token_dim(x)
    if token is None or any(isinstance(t, Tensor) and t.dtype != x.dtype for t in (weight, *more)):
        return None
    rows = _by_token(x)
    out = kernel(rows.reshape(rows.shape[0], -1), weight, *more)
    return out.view(rows.shape).movedim(0, token)  # type: ignore[return-value]


def _layer_norm(
    x: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Value | None:
    return _norm(elementwise.layer_norm, x, normalized_shape, weight, bias, eps)


def _rms_norm(
    x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Value | None:
    least = torch.finfo(x.dtype).eps if eps is None else eps
    return _norm(elementwise.rms_norm, x, normalized_shape, weight, least)


def _joined(tensors: Any, dim: int = 0) -> Value | None:
    """Record parts next to each other. Linear kernels write them there; others are copied."""
    if not all(type(part) is Value and part.dtype == torch.float32 for part in tensors):
        return None
    first = tensors[0]
    axis = dim % first.dim()
    if first.dim() == 2 and axis == 1 and (joined := first.recorder.joined(tensors)) is not None:
        return joined
    tokens = {token_dim(part) for part in tensors}
    token: Any = tokens.pop()
    if tokens or token in (None, axis):
        return None
    sizes = [part.shape[axis] for part in tensors]
    out = _result(first, (*first.shape[:axis], sum(sizes), *first.shape[axis + 1 :]), token)
    places: Any = out.split(sizes, axis)
    done = [_emit("mul", place, token, x, 1.0) for place, x in zip(places, tensors, strict=True)]
    return out if all(done) else None


def _stacked(tensors: Any, dim: int = 0) -> Value | None:
    first = tensors[0]
    axis = dim % (first.dim() + 1)
    return _joined([part.unsqueeze(axis) for part in tensors], axis)


def _copied(x: Any) -> Value | None:
    """Record a contiguous copy. Returns None if the tokens are not the first dimension, apart from
    dimensions of size 1."""
    token = token_dim(x)
    if token is None or prod(x.shape[:token]) > 1:
        return None
    return _pointwise("mul", x, 1.0)


def _clone(x: Any, memory_format: Any = None) -> Value | None:
    return _pointwise("mul", x, 1.0)


def _is_table(x: Any) -> bool:
    """Return whether x is a matrix of floats, or a list of integers."""
    return (
        type(x) is not Value
        and (x.dtype, x.dim()) in ((torch.float32, 2), (torch.int64, 1))
        and x.is_contiguous()
    )


def _row_of_table(table: Any, index: Any) -> Value | None:
    """Record table[index]: rows of floats, or single integers, which are copied as two floats."""
    if not _is_table(table) or type(index) is not Value or index.dtype != torch.int64:
        return None
    recorder = index.recorder
    ids = index.reshape(-1)
    out: Value = recorder.value(table[:1].nbytes // 4)
    arguments = LookupFloat(table=table.data_ptr(), columns=out.shape[1])
    submit(ids, Call("lookup_float", arguments, {"ids": ids}, {"out": out}, table))
    if table.dim() == 2:
        return out.view(*index.shape, -1)  # type: ignore[return-value]
    numbers = torch.empty(recorder.rows, dtype=table.dtype, device="meta")
    return Value(recorder, out.buffer, numbers).view(index.shape)  # type: ignore[return-value]


def _embedding(
    ids: Any,
    table: Any,
    padding_idx: Any = None,
    max_norm: None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value | None:
    return _row_of_table(table, ids) if max_norm is None else None


def _columns_of(x: Any, dim: Any, index: Any) -> Value | None:
    """Record the choice of some columns [n] of a stand-in [T, m]."""
    if (
        type(x) is not Value
        or x.dim() != 2
        or x.stride(1) != 1
        or x.dtype != torch.float32
        or dim not in (1, -1)
    ):
        return None
    if type(index) is Value or index.dtype != torch.int64 or not index.is_contiguous():
        return None
    out: Value = x.recorder.value(len(index))
    arguments = TakeColumns(order=index.data_ptr(), columns=len(index))
    submit(x, Call("take_columns", arguments, {"x": x}, {"out": out}, index))
    return out


FUNCTIONS: dict[str, Callable[..., Value | None]] = {
    "add": _add,
    "add_": _add_in_place,
    "__iadd__": _add_in_place,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": lambda x: _pointwise("mul", x, -1.0),
    "square": lambda x: _power(x, 2),
    "pow": _power,
    "rsqrt": lambda x: _pointwise("rsqrt", x),
    "clamp": _clamp,
    "gelu": _gelu,
    **{name: partial(_activation, name) for name in ("relu", "sigmoid", "tanh", "silu", "elu")},
    "dropout": _dropout,
    "mean": _mean,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "cat": _joined,
    "stack": _stacked,
    "clone": _clone,
    "embedding": _embedding,
    "index_select": _columns_of,
}
"""By their names."""

OF_OTHERS: dict[str, Callable[..., Value | None]] = {
    "__getitem__": _row_of_table,
    "contiguous": _copied,
}
"""Functions that usually return a view of a stand-in. Here they look up rows of a plain tensor, and
copy where a view is impossible."""
