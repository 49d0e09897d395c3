"""Everything that needs a GPU, in one run: first whether kernels are right, then how fast they are.
It writes one JSON.

    python tests/gpu/measure.py                                    # on a GPU, two minutes
    python tests/gpu/measure.py --device cpu --interpret --tiny    # the script itself, in Triton's
    interpreter

A part that is already in the JSON is not run again, so a run that was cut off can be resumed. After
`--minutes`, no further part is started. Errors are relative norms, against float64 on the same
device. Rates are shown with their share of the roof that this run has measured: a large copy for
memory, and torch's product of two large matrices for arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure_packed
import torch
from torch import Tensor

LIMITS = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""The largest relative error of each type."""
PLATFORM = "rocm" if torch.version.hip else "cuda"
"""Pegboard's name for torch's "cuda"."""


class Run:
    """device: torch device. tiny: sizes that the interpreter can compute. results: by the name of
    the part."""

    def __init__(self, device: str, tiny: bool, results: dict[str, Any]) -> None:
        self.device = device
        self.tiny = tiny
        self.results = results

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def seconds(self, call: Callable[[], object], captured: bool = True) -> float:
        """Return how long a call takes on the device: the median of five rounds of several calls.
        captured: on a GPU, each round is one graph, so that the host's time for launches is not in
        it."""
        rounds, calls = (1, 1) if self.tiny else (5, 10)

        def run() -> None:
            for _ in range(calls):
                call()

        call()
        if captured and self.device.startswith("cuda"):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            graph.replay()
            run = graph.replay
        times = []
        for _ in range(rounds):
            self.wait()
            started = time.perf_counter()
            run()
            self.wait()
            times.append((time.perf_counter() - started) / calls)
        return sorted(times)[len(times) // 2]

    def wait(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def of_roof(self, rate: float, roof: str) -> float | None:
        """Return the share of a roof that this run has measured."""
        known = self.results.get(roof, {}).get("rate")
        return round(rate / known, 3) if known else None


def error(found: Tensor, expected: Tensor) -> dict[str, Any]:
    """Return the relative norm of the difference, and whether the type allows it."""
    wide = expected.double()
    relative = float((found.double() - wide).norm() / wide.norm().clamp(min=1e-30))
    return {"error": relative, "right": relative <= LIMITS[str(found.dtype).removeprefix("torch.")]}


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
    return {"rate": rate, "of_roof": run.of_roof(rate, roof)}


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


def tokens_equal_the_cpu(run: Run) -> dict[str, Any]:
    """The default model in float32 on the device and on the CPU, with and without recorded
    steps."""
    if run.tiny:
        return {"skipped": "too large for the interpreter"}
    from pegboard import LLM, SamplingParams

    def generate(**settings: Any) -> tuple[list[list[int]], float]:
        with LLM(dtype="float32", kv_cache_dtype="float32", max_model_len=512, **settings) as llm:
            started = time.perf_counter()
            params = SamplingParams(temperature=0, max_tokens=48)
            done = llm.generate(
                ["The capital of France is", "1, 1, 2, 3, 5,"] * 8, params, use_tqdm=False
            )
            return [
                list(output.outputs[0].token_ids) for output in done
            ], time.perf_counter() - started

    (expected, _) = generate(device="cpu")
    (eager, _) = generate(device=PLATFORM, enforce_eager=True)
    captured, seconds = generate(device=PLATFORM)
    equal = {
        name: sum(map(list.__eq__, rows, expected))
        for name, rows in (("eager", eager), ("captured", captured))
    }
    right = expected == eager == captured
    return {
        "right": right,
        "equal": equal,
        "rows": len(expected),
        "tokens_per_s": sum(map(len, captured)) / seconds,
    }


def bench_generate(run: Run, **settings: Any) -> dict[str, Any]:
    """The default model in its default type: seconds to start, output tokens per second of 1 to 256
    short prompts that run together, short prompts per second, one after another, with one token
    each, and input tokens per second of long prompts, first computed and then found in the prefix
    cache. Each rate is the best of three."""
    if run.tiny:
        return {"skipped": "too large for the interpreter"}
    from pegboard import LLM, SamplingParams

    started = time.perf_counter()
    with LLM(device=PLATFORM, max_model_len=2048, **settings) as llm:
        found: dict[str, Any] = {
            "start_s": round(time.perf_counter() - started, 2),
            "output_tokens_per_s": {},
        }

        def rate(prompts: list[Any], params: SamplingParams, tokens: int) -> float:
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return round(tokens / (time.perf_counter() - started), 1)

        greedy = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
        sampled = SamplingParams(
            temperature=0.8, top_p=0.95, top_k=50, max_tokens=128, ignore_eos=True
        )
        for name, count, params in (
            (("1"), 1, greedy),
            (("8"), 8, greedy),
            (("32"), 32, greedy),
            (("256"), 256, greedy),
            (("256 sampled"), 256, sampled),
        ):
            prompts = [f"{index}. Write about the river and the town:" for index in range(count)]
            found["output_tokens_per_s"][name] = max(
                rate(prompts, params, 128 * count) for _ in range(3)
            )
        one = SamplingParams(temperature=0, max_tokens=1)

        def short() -> float:
            started = time.perf_counter()
            for _ in range(20):
                llm.generate([torch.randint(100, 40_000, (30,)).tolist()], one, use_tqdm=False)
            return round(20 / (time.perf_counter() - started), 1)

        found["prompts_per_s"] = max(short() for _ in range(3))
        rows = 32
        length = 1500
        computed = 0.0
        cached = 0.0
        for _ in range(3):
            prompts = [torch.randint(100, 40_000, (length,)).tolist() for _ in range(rows)]
            computed = max(computed, rate(prompts, one, rows * length))
            cached = max(cached, rate(prompts, one, rows * length))
        found["input_tokens_per_s"] = {"computed": computed, "cached": cached}
    return found


def bench_host(run: Run) -> dict[str, Any]:
    """The host's time per decode step of 256 requests, without the device."""
    from host_time import SETTINGS, host_step

    return {
        name: host_step(*((4, 5) if run.tiny else (256, 200)), **params)
        for name, params in SETTINGS.items()
    }


FP8 = torch.float8_e4m3fn
PARTS: dict[str, Callable[[Run], dict[str, Any]]] = {
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
    "tokens_equal_the_cpu": tokens_equal_the_cpu,
    "memory_roof": memory_roof,
    "matrix_roof": matrix_roof,
    "bench_add_rms_norm": bench_norm,
    "bench_decode_attention": lambda run: bench_attention(run, 64, 4096, 1, "memory_roof"),
    "bench_decode_attention_one_row": lambda run: bench_attention(run, 1, 32768, 1, "memory_roof"),
    "bench_decode_attention_fp8": lambda run: bench_attention(run, 64, 4096, 1, "memory_roof", FP8),
    "bench_prefill_attention": lambda run: bench_attention(run, 1, 8192, 8192, "matrix_roof"),
    **measure_packed.BENCHES,
    "bench_sample_tokens": bench_sampling,
    "bench_generate": bench_generate,
    "bench_generate_eager": lambda run: bench_generate(run, enforce_eager=True),
    **{
        f"bench_generate_{mode}": lambda run, mode=mode: bench_generate(run, recording_mode=mode)
        for mode in ("full", "full_decode_only", "piecewise")
    },
    "bench_host_time": bench_host,
}
"""The parts in their order: what is right comes before what is fast."""


def main() -> int:
    """Return 0 if every part has run and is right."""
    parser = argparse.ArgumentParser(description="Check and measure Pegboard on a GPU.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--interpret", action="store_true", help="use Triton's interpreter")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test this script")
    parser.add_argument("--minutes", type=float, default=7.5)
    parser.add_argument("--out", type=Path, default=Path("measure.json"))
    options = parser.parse_args()
    if options.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
        from triton.runtime.interpreter import InterpreterBuilder

        from pegboard_testing.fake_triton import corrected_products

        InterpreterBuilder.create_dot = corrected_products()
    elif options.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "torch finds no GPU; --device cpu --interpret --tiny tests the script without one"
        )
    results = json.loads(options.out.read_text("utf-8")) if options.out.exists() else {}
    import triton  # after the environment is set

    results["machine"] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else options.device,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "interpreted": options.interpret,
        "tiny": options.tiny,
    }
    torch.manual_seed(0)
    run = Run(options.device, options.tiny, results)
    started = time.perf_counter()
    for name, part in PARTS.items():
        if name in results and results[name].get("right", True):
            continue
        if time.perf_counter() - started > 60 * options.minutes:
            print("out of time: run it again to continue")
            break
        before = time.perf_counter()
        try:
            results[name] = part(run)
        except Exception as failure:  # noqa: BLE001 – the other parts are still worth running
            results[name] = {"right": False, "failed": f"{type(failure).__name__}: {failure}"}
        results[name]["took_s"] = round(time.perf_counter() - before, 2)
        options.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
        print(name, json.dumps(results[name]), flush=True)
    wrong = [name for name in PARTS if name not in results or not results[name].get("right", True)]
    print("wrong or not run: " + ", ".join(wrong) if wrong else "all parts are right")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
