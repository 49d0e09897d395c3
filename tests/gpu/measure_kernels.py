"""The parts of `measure.py` about kernels: whether they are right, and how fast they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import measure_packed
import torch
from measure_run import LIMITS, Run, error
from torch import Tensor


class Step:
    """Rows of queries and a paged cache in shuffled blocks. lengths: tokens of each row. new: of
    them, the newest to compute."""

    def __init__(
        self,
        run: Run,
        lengths: list[int],
        new: list[int],
        heads: int,
        kv_heads: int,
        width: int,
        dtype: torch.dtype,
        stored: torch.dtype | None = None,
    ) -> None:
        size = 16
        used = [-(-length // size) for length in lengths]
        order = torch.randperm(sum(used), dtype=torch.int32).add_(1).split(used)
        self.table = torch.zeros(len(lengths), max(used), dtype=torch.int32)
        for row, blocks in zip(self.table, order, strict=True):
            row[: len(blocks)] = blocks
        self.table = self.table.to(run.device)
        cache = run.random(2, sum(used) + 1, size, kv_heads, width, dtype=dtype)
        self.scales = None if stored is None else torch.full((kv_heads,), 0.5, device=run.device)
        self.k, self.v = cache if stored is None else cache.float().to(stored)
        self.starts = torch.tensor([0, *new]).cumsum(0).to(run.device, torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=run.device)
        self.q = run.random(sum(new), heads, width, dtype=dtype)
        self.bytes = 2 * sum(lengths) * kv_heads * width * self.k.element_size()
        self.operations = sum(
            4 * heads * width * (count * length - count * (count - 1) // 2)
            for count, length in zip(new, lengths, strict=True)
        )

    def call(self, **rules: Any) -> Tensor:
        from pegboard_attention_triton.attention import paged_attention

        arguments = (
            self.q,
            self.k,
            self.v,
            self.table,
            self.starts,
            self.lengths,
            self.q.shape[-1] ** -0.5,
        )
        return paged_attention(*arguments, k_scale=self.scales, v_scale=self.scales, **rules)

    def expected(self, **rules: Any) -> Tensor:
        from pegboard_testing.attention_reference import paged_attention

        factor = 1.0 if self.scales is None else 0.5
        k = self.k.double() * factor
        v = self.v.double() * factor
        return paged_attention(
            self.q.double(),
            k,
            v,
            self.table,
            self.starts,
            self.lengths,
            self.q.shape[-1] ** -0.5,
            **rules,
        )


def check_norm(run: Run, dtype: torch.dtype) -> dict[str, Any]:
    from pegboard_kernel_triton import norm

    from pegboard import ops

    size = 96 if run.tiny else 4096
    x = run.random(7, size, dtype=dtype)
    weight = run.random(size, dtype=dtype)
    return error(norm.rms_norm(x, weight, 1e-5), ops.rms_norm(x.double(), weight.double(), 1e-5))


def check_rope(run: Run, dtype: torch.dtype) -> dict[str, Any]:
    from pegboard_kernel_triton import elementwise

    from pegboard import ops

    x = run.random(5, 4, 64, dtype=dtype)
    angles = run.random(5, 32)
    expected = ops.rope(x.double(), angles.cos().double(), angles.sin().double(), False)
    return error(elementwise.rope(x, angles.cos(), angles.sin(), False), expected)


def check_activation(run: Run, dtype: torch.dtype) -> dict[str, Any]:
    from pegboard_kernel_triton import elementwise

    from pegboard import ops

    x = run.random(5, 2 * (96 if run.tiny else 11008), dtype=dtype)
    return error(elementwise.silu_mul(x), ops.silu_mul(x.double()))


def check_experts(run: Run, dtype: torch.dtype) -> dict[str, Any]:
    """Few rows, and more than a small tile has. The last ones have no expert."""
    from pegboard_kernel_triton.experts import multiply_experts

    width, outputs = (40, 24) if run.tiny else (2048, 1408)
    weights = run.random(3, outputs, width, dtype=dtype)
    results = []
    for counts in ((1, 0, 3), (150, 2, 0)):
        owners = torch.arange(3, device=run.device).repeat_interleave(
            torch.tensor(counts, device=run.device)
        )
        starts = torch.tensor([0, *counts], device=run.device).cumsum(0).int()
        x = run.random(len(owners) + 2, width, dtype=dtype)
        expected = torch.zeros(len(x), outputs, dtype=torch.float64, device=run.device)
        for expert, matrix in enumerate(weights.double()):
            at = (owners == expert).nonzero().flatten()
            expected[at] = x[at].double() @ matrix.T
        results.append(error(multiply_experts(x, starts, weights), expected))
    return max(results, key=lambda result: result["error"])


def check_adapters(run: Run, dtype: torch.dtype) -> dict[str, Any]:
    from pegboard_kernel_triton import lora

    from pegboard import ops
    from pegboard_testing.fake_build import adapter_rows

    width, bounds = (40, (0, 24, 30)) if run.tiny else (4096, (0, 4096, 5120))
    ranks = torch.tensor([16, 5, 0], dtype=torch.int32, device=run.device)
    a = run.random(3, width, 2, 16, dtype=dtype) / width**0.5
    b = run.random(3, 16, bounds[-1], dtype=dtype)
    for slot, rank in enumerate((16, 5, 0)):
        a[slot, :, :, rank:] = 0
        b[slot, rank:] = 0
    rows = adapter_rows([0, 1, 2, 3, 2, 1, 1], 3)
    rows = ops.AdapterRows(*(part.to(run.device) for part in rows))
    x = run.random(7, width, dtype=dtype)
    y = run.random(7, bounds[-1], dtype=dtype)
    wide = (part.double() for part in (y, x, a.flatten(2), b))
    expected = ops.lora_add(*wide, ranks, bounds, rows)
    return error(lora.lora_add(y, x, a.flatten(2), b, ranks, bounds, rows), expected)


def check_states(run: Run, dtype: torch.dtype) -> dict[str, Any]:
    """Rows of several tokens and of one, new and not, in a padded step. Returns the largest
    error."""
    from pegboard_kernel_triton import states

    from pegboard.ops import StateRows
    from pegboard_models import state_ops

    lengths = [1, 1, 5, 2] if run.tiny else [1] * 30 + [500, 33, 1]
    heads, head_dim, size = (2, 4, 8) if run.tiny else (16, 64, 128)
    num_rows = len(lengths)
    count = sum(lengths)
    starts = torch.tensor([0, *lengths, 0, 0]).cumsum(0).int()
    seq_lens = starts.diff() + torch.arange(num_rows + 2).int() % 2 * 9
    seq_lens[num_rows:] = 0
    table = torch.zeros(num_rows + 2, 2, dtype=torch.int32)
    table[:num_rows, 0] = torch.randperm(num_rows) + 1
    padded = StateRows(*(part.to(run.device) for part in (table, seq_lens, starts)), None)
    parts = padded.table[:num_rows], padded.seq_lens[:num_rows], padded.query_start_loc[:-2]
    real = StateRows(*parts, starts[:-2].tolist())

    def tokens(*shape: int) -> Tensor:
        return run.random(count + 3, *shape, dtype=dtype)

    def weight(*shape: int) -> Tensor:
        return run.random(*shape, dtype=torch.float32)

    inner = heads * head_dim
    bc = [tokens(size) for _ in range(2)]
    groups = [tokens(2, size) for _ in range(2)]
    per_head = tokens(heads, head_dim)
    steps = tokens(heads)
    scan = tokens(inner), tokens(inner), weight(inner, size), *bc, weight(inner)
    limits = 0.0, float("inf")
    chunks = per_head, steps, weight(heads), limits, weight(heads), *groups, weight(heads)
    delta = *groups, per_head, steps, weight(heads), weight(heads), tokens(heads)
    cases: dict[str, tuple[tuple[Any, ...], tuple[int, ...], tuple[Any, ...]]] = {
        "causal_conv": ((tokens(inner), weight(inner, 4), None), (inner, 3), (True,)),
        "selective_scan": (scan, (inner, size), ()),
        "chunked_scan": (chunks, (heads, head_dim, size), ()),
        "gated_delta_rule": (delta, (heads, head_dim, size), ()),
    }
    results = []
    for name, (inputs, shape, after) in cases.items():
        state = weight(num_rows + 1, *shape)
        other = state.clone()
        found = getattr(states, name)(*inputs, state, padded, *after)
        wide = [
            part[:count].float() if isinstance(part, Tensor) and len(part) == count + 3 else part
            for part in inputs
        ]
        expected = getattr(state_ops, name)(*wide, other, real, *after)
        results += [error(found[:count], expected), error(state, other)]
        results.append({"error": 0.0, "right": not bool(found[count:].any())})
    wrong = [result for result in results if not result["right"]]
    return max(wrong or results, key=lambda result: result["error"])


def check_attention(
    run: Run,
    dtype: torch.dtype,
    stored: torch.dtype | None = None,
    width: int = 64,
    decodes: bool = False,
    **rules: Any,
) -> dict[str, Any]:
    lengths, new = ([19, 7, 40], [19, 2, 1]) if run.tiny else ([900, 77, 4000, 1], [900, 33, 1, 1])
    step = Step(run, lengths, [1] * len(new) if decodes else new, 8, 2, width, dtype, stored)
    return error(step.call(**rules), step.expected(**rules))


def check_rules(run: Run, **rules: Any) -> dict[str, Any]:
    """What some models add to attention, in a step with prompts and in one of decodes."""
    found = [
        check_attention(run, torch.float32, decodes=decodes, **rules) for decodes in (False, True)
    ]
    return {
        "error": max(one["error"] for one in found),
        "right": all(one["right"] for one in found),
    }


def check_sampling(run: Run) -> dict[str, Any]:
    """Rounding may move a draw to a neighbor, so that nearly all tokens must be equal."""
    from pegboard_kernel_triton import sampling

    from pegboard.ops.sampling import sample_tokens

    count, vocab = (3, 300) if run.tiny else (256, 128256)
    logits = run.random(count, vocab) * 4
    ones = torch.ones(count, device=run.device)
    uniforms = torch.rand(count, device=run.device, dtype=torch.float64)
    cuts = ones * 0.8, None, torch.full((count,), 50, device=run.device), ones * 0.9
    same = (
        (sampling.sample_tokens(logits, uniforms, *cuts) == sample_tokens(logits, uniforms, *cuts))
        .float()
        .mean()
    )
    return {"equal": float(same), "right": bool(same > 0.98)}


def memory_roof(run: Run) -> dict[str, Any]:
    x = run.random(1 << (16 if run.tiny else 29))
    y = torch.empty_like(x)
    # a captured copy was slower on an H200
    seconds = run.seconds(lambda: y.copy_(x), captured=False)
    return {"rate": 2 * x.nbytes / seconds, "unit": "bytes/s"}


def matrix_roof(run: Run) -> dict[str, Any]:
    size = 64 if run.tiny else 8192
    a, b = run.random(2, size, size, dtype=torch.bfloat16)
    return {"rate": 2 * size**3 / run.seconds(lambda: a @ b), "unit": "operations/s"}


def bench_attention(
    run: Run, rows: int, length: int, new: int, roof: str, stored: torch.dtype | None = None
) -> dict[str, Any]:
    """The shape of Llama 3.1 8B: 32 query heads, 8 KV heads of 128 channels."""
    shape = (
        ([20] * 2, [min(new, 20)] * 2, 2, 1, 16)
        if run.tiny
        else ([length] * rows, [new] * rows, 32, 8, 128)
    )
    step = Step(run, *shape, torch.bfloat16, stored)
    rate = (step.bytes if roof == "memory_roof" else step.operations) / run.seconds(step.call)
    return {"rate": rate, "roof": roof, "of_roof": run.of_roof(rate, roof)}


def bench_norm(run: Run) -> dict[str, Any]:
    from pegboard_kernel_triton import norm

    x, residual = run.random(2, *((4, 64) if run.tiny else (8192, 4096)), dtype=torch.bfloat16)
    weight = run.random(x.shape[1], dtype=torch.bfloat16)
    rate = 4 * x.nbytes / run.seconds(lambda: norm.add_rms_norm(x, residual, weight, 1e-5))
    return {"rate": rate, "of_roof": run.of_roof(rate, "memory_roof")}


def bench_sampling(run: Run) -> dict[str, Any]:
    from pegboard_kernel_triton import sampling

    count, vocab = (2, 200) if run.tiny else (256, 128256)
    logits = run.random(count, vocab) * 4
    ones = torch.ones(count, device=run.device)
    uniforms = torch.rand(count, device=run.device, dtype=torch.float64)
    return {
        "seconds": run.seconds(
            lambda: sampling.sample_tokens(logits, uniforms, ones, None, None, ones * 0.9)
        ),
        "rows": count,
    }


def bench_host(run: Run) -> dict[str, Any]:
    """The host's time per decode step of 256 requests, without the device."""
    from host_time import SETTINGS, host_step

    return {
        name: host_step(*((4, 5) if run.tiny else (256, 200)), **params)
        for name, params in SETTINGS.items()
    }


FP8 = torch.float8_e4m3fn
CHECKS: dict[str, Callable[[Run], dict[str, Any]]] = {
    **{
        f"{name}_{dtype}": lambda run, check=check, dtype=dtype: check(run, getattr(torch, dtype))
        for name, check in (
            ("rms_norm", check_norm),
            ("rope", check_rope),
            ("silu_mul", check_activation),
            ("experts", check_experts),
            ("lora_add", check_adapters),
            ("states", check_states),
            ("attention", check_attention),
        )
        for dtype in LIMITS
    },
    **{
        f"attention_{name}_{dtype}": lambda run, dtype=dtype, more=more: check_attention(
            run, getattr(torch, dtype), **more
        )
        for name, more in (
            ("decode", {"decodes": True}),
            ("256", {"width": 256}),
            ("256_decode", {"width": 256, "decodes": True}),
        )
        for dtype in LIMITS
    },
    "attention_fp8_cache": lambda run: check_attention(run, torch.float32, FP8),
    "attention_e5m2_cache": lambda run: check_attention(
        run, torch.float32, torch.float8_e5m2, decodes=True
    ),
    "attention_window": lambda run: check_rules(run, window=30),
    "attention_chunk": lambda run: check_rules(run, chunk=64),
    "attention_soft_cap": lambda run: check_rules(run, soft_cap=5.0),
    "attention_sinks": lambda run: check_rules(run, sinks=torch.arange(8, device=run.device) / 4),
    **measure_packed.CHECKS,
    "sample_tokens": check_sampling,
}
ROOFS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "memory_roof": memory_roof,
    "matrix_roof": matrix_roof,
}
BENCHES: dict[str, Callable[[Run], dict[str, Any]]] = {
    "bench_add_rms_norm": bench_norm,
    "bench_decode_attention": lambda run: bench_attention(run, 64, 4096, 1, "memory_roof"),
    "bench_decode_attention_one_row": lambda run: bench_attention(run, 1, 32768, 1, "memory_roof"),
    "bench_decode_attention_fp8": lambda run: bench_attention(run, 64, 4096, 1, "memory_roof", FP8),
    "bench_prefill_attention": lambda run: bench_attention(run, 1, 8192, 8192, "matrix_roof"),
    **measure_packed.BENCHES,
    "bench_sample_tokens": bench_sampling,
    "bench_host_time": bench_host,
}
