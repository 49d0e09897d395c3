"""The parts of `measure.py` about packed weights: whether every form is right, and how fast
products are at the shapes of Llama 3.1 8B and Mixtral."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FORMS: dict[str, tuple[Any, ...]] = {
    "int4": (4, 128, torch.float16, "zeros"),
    "int8": (8, 128, torch.float16, ""),
    "q4_k": (4, 32, torch.int8, "minimum"),
    "q6_k": (6, 16, torch.int8, ""),
    "fp8": ("e4m3fn", torch.float32, (128, 128)),
    "mxfp4": ("e2m1", torch.float8_e8m0fnu, (1, 32)),
    "nvfp4": ("e2m1", torch.float8_e4m3fn, (1, 16)),
}
"""What `stored_rows.blocks_of` or `codes_of` make of random numbers."""
MOST_RANDOM = 2048
ERROR = 1e-2
"""The largest relative error of products in bfloat16."""


def packed(form: str, rows: int, columns: int, device: str) -> tuple[Any, Tensor]:
    """Return a random weight in this form on the device, and the values of its first rows in
    float32. Rows after the first MOST_RANDOM repeat them."""
    from pegboard_kernel_triton.packed_weight import TritonBlockWeight, TritonCodeWeight

    from pegboard_testing.stored_rows import blocks_of, codes_of

    given = FORMS[form]
    count = min(rows, MOST_RANDOM)
    part: Any
    if isinstance(given[0], int):
        kind: Any = TritonBlockWeight
        part = blocks_of(given, count, columns, 3, level=128)
    else:
        kind = TritonCodeWeight
        values, scale, block = given
        part = codes_of(values, scale, block, count, columns, 3)
    weight = kind((rows, columns), torch.bfloat16, device)
    for start in range(0, rows, count):
        weight.write(start, part)
    weight.finish()
    return weight, part.dense().to(device)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def check_product(run: Any, form: str) -> dict[str, Any]:
    """Few and many tokens, with and without experts."""
    rows, columns = (48, 384) if run.tiny else (1536, 3072)
    weight, matrix = packed(form, rows, columns, run.device)
    product = weight.bind()
    experts = weight.bind_experts(3, None)
    errors = []
    for count in (5,) if run.tiny else (1, 40, 300):
        x = run.random(count, columns, dtype=torch.bfloat16)
        errors.append(relative(product(x), x.double() @ matrix.double().T))
        half = count // 2
        starts = torch.tensor([0, half, half, count], dtype=torch.int32, device=run.device)
        wide = matrix.double().view(3, -1, columns)
        expected = torch.cat((x[:half].double() @ wide[0].T, x[half:].double() @ wide[2].T))
        errors.append(relative(experts(x, starts), expected))
    return {"error": max(errors), "right": max(errors) <= ERROR}


def bench_product(run: Any, form: str) -> dict[str, Any]:
    """The gate and up projection of Llama 3.1 8B: for few tokens, the bytes of the weight per
    second; for many, operations per second."""
    rows, columns = (32, 384) if run.tiny else (28672, 4096)
    weight, _ = packed(form, rows, columns, run.device)
    product = weight.bind()
    num_bytes = sum(tensor.nbytes for tensor in weight.tensors())
    results: dict[str, Any] = {"bits": round(8 * num_bytes / (rows * columns), 2)}
    for count in (1,) if run.tiny else (1, 16, 64, 256, 2048):
        x = run.random(count, columns, dtype=torch.bfloat16)
        seconds = run.seconds(lambda x=x: product(x))
        is_few = count <= 64
        rate = (num_bytes if is_few else 2 * count * rows * columns) / seconds
        roof = "memory_roof" if is_few else "matrix_roof"
        results[str(count)] = {"rate": rate, "of_roof": run.of_roof(rate, roof)}
    return results


def bench_experts(run: Any, form: str) -> dict[str, Any]:
    """Mixtral's gate and up projection, of 8 experts, for 32 tokens that go to 2 experts each."""
    rows, columns = (16, 384) if run.tiny else (28672, 4096)
    weight, _ = packed(form, 8 * rows, columns, run.device)
    count = 8 if run.tiny else 64
    x = run.random(count, columns, dtype=torch.bfloat16)
    starts = torch.arange(0, count + 1, count // 8, dtype=torch.int32).to(run.device)
    experts = weight.bind_experts(8, None)
    num_bytes = sum(tensor.nbytes for tensor in weight.tensors())
    rate = num_bytes / run.seconds(lambda: experts(x, starts))
    return {"rate": rate, "of_roof": run.of_roof(rate, "memory_roof")}


CHECKS: dict[str, Callable[[Any], dict[str, Any]]] = {
    f"packed_{form}": lambda run, form=form: check_product(run, form) for form in FORMS
}
BENCHES: dict[str, Callable[[Any], dict[str, Any]]] = {
    **{f"bench_packed_{form}": lambda run, form=form: bench_product(run, form) for form in FORMS},
    **{
        f"bench_packed_experts_{form}": lambda run, form=form: bench_experts(run, form)
        for form in ("int4", "fp8", "mxfp4")
    },
}
