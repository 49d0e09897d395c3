"""Measures how fast the CPU kernels multiply the linear layers of the default model, and the peak
rates of the machine.

    python tests/bench/rates.py [FORMAT …] [--levels LEVEL …] [--tokens N …] [--write]

For each level that the CPU has, prints the peak of its instructions for 8-bit integers, bfloat16
numbers and floats, and then for each format of weights GOP/s by the number of tokens of a step.
--write puts them on docs/performance.md. The weights are larger than the caches, as in a model.
Activations are quantized where the format needs it, once per layer. If 1 is the first number of
tokens, GB/s of weights follow, to compare with how fast the memory is read. Each number is the best
of the runs within RUN_S seconds.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from machine import cpu, read_gb_per_s
from page import PAGE, put
from pegboard_kernel_cpu.block_weight import NativeBlockWeight
from pegboard_kernel_cpu.build import LEVELS, SWITCHES, compiler, usable_levels
from pegboard_kernel_cpu.code_weight import NativeCodeWeight
from pegboard_kernel_cpu.float_weight import NativeFloatWeight
from pegboard_kernel_cpu.library import using
from pegboard_kernel_cpu.replay import NativeReplay
from torch import Tensor

from pegboard.env import cpu_flags
from pegboard.ops.blocks import Blocks
from pegboard.ops.float_codes import FloatCodes, float8_values

BEGIN = "<!-- rates: written by tests/bench/rates.py --write -->"
END = "<!-- end of rates -->"

HIDDEN = 576
SHAPES = ((960, HIDDEN), (HIDDEN, HIDDEN), (3072, HIDDEN), (HIDDEN, 1536))
"""The matrices [out, in] of a layer of SmolLM2-135M. A layer reads as many of the previous one's
results as it has columns."""

WEIGHTS = 2**26
"""At least this many weights are multiplied in a step."""

TOKENS = (1, 8, 32, 128, 512)
RUN_S = 0.7
ROUNDS = 0x100000


def integers(matrix: Tensor, bits: int, size: int, has_minimum: bool) -> Blocks:
    """Round to integers of `bits` bits with a scale per `size` columns, and with a minimum or, for
    fewer than 8 bits, the zero point in the middle."""
    rows, columns = matrix.shape
    parts = matrix.view(rows, columns // size, size)
    low, largest = parts.amin(2, keepdim=True), parts.abs().amax(2, keepdim=True)
    scale = (parts.amax(2, keepdim=True) - low) / (2**bits - 1)
    zero = 0 if has_minimum or bits == 8 else 2 ** (bits - 1)
    if not has_minimum:
        low, scale = torch.zeros_like(low), largest / (2 ** (bits - 1) - 1)
    codes = ((parts - low) / scale + zero).round().view(rows, columns)
    return Blocks(
        bits,
        size,
        codes.to(torch.int8 if bits == 8 else torch.uint8),
        scale.squeeze(2).half(),
        low.squeeze(2).half() if has_minimum else None,
        zero,
    )


def two_levels(matrix: Tensor) -> Blocks:
    """Round to 4 bits with scales and minimums of 4 bits, of which 64 columns share the factors
    (Q4_K is similar, but its scales have 6 bits)."""
    rows, columns = matrix.shape
    parts = matrix.view(rows, columns // 64, 2, 32)
    low = parts.amin(3)
    wanted = torch.stack([(parts.amax(3) - low) / 15, low])  # [2, rows, columns / 64, 2]
    outer = (torch.gather(wanted, 3, wanted.abs().argmax(3, keepdim=True)) / 15).half()
    steps = (wanted / outer.float()).round().clamp(0, 15)
    scale, minimum = (steps * outer.float()).unsqueeze(4)
    codes = ((parts - minimum) / scale).round().clamp(0, 15).view(rows, columns)
    both = (steps[0].int() | steps[1].int() << 4).to(torch.uint8).view(rows, columns // 32)
    return Blocks(4, 32, codes.to(torch.uint8), both, outer=outer.squeeze(3).contiguous())


def float8(matrix: Tensor) -> FloatCodes:
    codes = (matrix * 256).to(torch.float8_e4m3fn).view(torch.uint8)
    scale = torch.full((1, 1), 1 / 256)
    return FloatCodes(codes, float8_values(torch.float8_e4m3fn), scale, tuple(matrix.shape))


ROUNDED: dict[str, Callable[[Tensor], Any]] = {
    "q4_1": lambda matrix: integers(matrix, 4, 32, True),
    "q4_0": lambda matrix: integers(matrix, 4, 32, False),
    "q4_two_levels": two_levels,
    "q4_group_64": lambda matrix: integers(matrix, 4, 64, False),
    "q5_0": lambda matrix: integers(matrix, 5, 32, False),
    "q6": lambda matrix: integers(matrix, 6, 16, False),
    "q8_0": lambda matrix: integers(matrix, 8, 32, False),
    "float8": float8,
    "bfloat16": lambda matrix: matrix.bfloat16(),
    "float16": lambda matrix: matrix.half(),
    "float32": lambda matrix: matrix,
}
"""Format → what the weights of a float32 matrix are in it."""


def weight_of(name: str, matrix: Tensor) -> Any:
    rounded = ROUNDED[name](matrix)
    shape = (matrix.shape[0], matrix.shape[1])
    if isinstance(rounded, Tensor):
        plain = NativeFloatWeight(shape, rounded.dtype, "cpu")
        plain.plain().copy_(rounded)
        plain.finish()
        return plain
    kind = NativeBlockWeight if isinstance(rounded, Blocks) else NativeCodeWeight
    weight = kind(shape, torch.float32, "cpu")
    weight.write(0, rounded)
    weight.finish()
    return weight


def measure(name: str, tokens: Sequence[int]) -> tuple[list[float], float]:
    """Return GOP/s by number of tokens, and GB/s of weights with the first of them."""
    count = -(-WEIGHTS // sum(rows * columns for rows, columns in SHAPES)) * len(SHAPES)
    matrices = [torch.randn(shape) / shape[1] ** 0.5 for shape in SHAPES]
    weights = [weight_of(name, matrices[index % len(SHAPES)]) for index in range(count)]
    layers = [weight.bind() for weight in weights]

    def forward(x: Tensor) -> tuple[Tensor, ...]:
        for layer, weight in zip(layers, weights, strict=True):
            x = layer(x[:, : weight.shape[1]])
        return (x,)

    x = torch.randn(max(tokens), HIDDEN)
    program = NativeReplay().record(forward, [x])
    products = sum(rows * columns for rows, columns in SHAPES) * count // len(SHAPES)
    num_bytes = sum(part.nbytes for weight in weights for part in weight.tensors())
    rates = []
    for number in tokens:
        seconds = best(lambda number=number: program(number))
        rates.append(2 * products * number / seconds / 1e9)
        if number == tokens[0]:
            bandwidth = num_bytes / seconds / 1e9
    return rates, bandwidth


def best(run: Callable[[], Any]) -> float:
    """Return the seconds of the fastest run."""
    started = time.perf_counter()
    fastest = float("inf")
    while (now := time.perf_counter()) < started + RUN_S:
        run()
        fastest = min(fastest, time.perf_counter() - now)
    return fastest


def peaks(level: str, num_threads: int) -> list[float]:
    """Return the most GOP/s of this many threads for 8-bit integers, bfloat16 numbers and floats,
    without memory. 0 = no such instruction."""
    source = Path(__file__).with_name("peaks.c")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "peaks.so")
        command = [str(compiler()), *SWITCHES, *LEVELS[level], "-shared", "-fPIC"]
        subprocess.run([*command, str(source), "-o", str(path)], check=True)
        functions = ctypes.CDLL(str(path))
    rates = []
    with ThreadPoolExecutor(num_threads) as pool:
        for name in ("integers", "bfloats", "floats"):
            function = getattr(functions, name)
            function.restype, function.argtypes = ctypes.c_int64, (ctypes.c_int64,)
            rounds = [ROUNDS] * num_threads
            seconds = best(lambda run=function, rounds=rounds: list(pool.map(run, rounds)))
            rates.append(sum(map(function, rounds)) / seconds / 1e9)
    return rates


def section(level: str, formats: Sequence[str], tokens: Sequence[int], threads: int) -> str:
    """Return a table in Markdown, below a line with the peaks."""
    most = zip(("8-bit integers", "bfloat16", "float32"), peaks(level, threads), strict=True)
    peak = ", ".join(f"{name} {rate:,.0f}" for name, rate in most if rate)
    has_bandwidth = tokens[0] == 1
    heads = ["weights", *map(str, tokens), *(["GB/s at 1"] if has_bandwidth else [])]
    rows = [f"`{level}`, peaks in GOP/s: {peak}\n", _row(heads), _row(["---"] * len(heads))]
    for name in formats:
        rates, bandwidth = measure(name, tokens)
        numbers = [f"{rate:,.0f}" for rate in rates] + [f"{bandwidth:.1f}"] * has_bandwidth
        rows.append(_row([name, *numbers]))
        print(rows[-1], file=sys.stderr, flush=True)
    return "\n".join(rows)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=", ".join(ROUNDED))
    parser.add_argument("--levels", nargs="*", choices=LEVELS)
    parser.add_argument("--tokens", nargs="*", type=int, default=TOKENS)
    parser.add_argument("--write", action="store_true", help=f"to the page {PAGE.name}")
    chosen = parser.parse_args()
    if unknown := set(chosen.formats) - ROUNDED.keys():
        parser.error(f"unknown format {min(unknown)!r}; there are {', '.join(ROUNDED)}")
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    parts = [f"{cpu()['cpu']}, {threads} threads, memory read at {read_gb_per_s(5):.1f} GB/s."]
    for level in chosen.levels or usable_levels(cpu_flags()):
        with using(level, threads):
            parts.append(section(level, chosen.formats or list(ROUNDED), chosen.tokens, threads))
    text = "\n\n".join(parts)
    if chosen.write:
        PAGE.write_text(put(PAGE.read_text("utf-8"), text, BEGIN, END), "utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
