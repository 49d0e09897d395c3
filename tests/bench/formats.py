"""How fast the CPU kernels multiply with weights of each format, against Q4_1 of GGUF.

    python tests/bench/formats.py [FORMAT …]

A format is a contract test of a quantization method, by its method and its class without `Test`:
`awq:Gemm`. Default: AWQ and GPTQ in groups of 128 and 32 columns, and Q4_0. Weights are random, in
the format's own layout, and together larger than the caches, as the layers of a model are. Formats
take turns. Prints the median time of a product for 1, 8 and 32 tokens, and the median of its ratio
to the product with Q4_1 next to it. Takes about half a minute.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from pegboard_kernel_cpu.block_weight import NativeBlockWeight
from pegboard_kernel_cpu.code_weight import NativeCodeWeight
from torch import Tensor

from pegboard.interfaces.quantization import LinearLayer, Part, QuantizationSetup
from pegboard.ops import REFERENCES
from pegboard_testing.authoring.formats_page import contracts, methods
from pegboard_testing.contract_quantization import QuantizationContract, load_pieces
from pegboard_testing.held_memory import held_bytes

KERNELS = {**REFERENCES, "block_weight": NativeBlockWeight, "code_weight": NativeCodeWeight}
ROWS = 4096
COLUMNS = 2048
COPIES = 16
TOKENS = (1, 8, 32)
ROUNDS = 20
FORMATS = {
    f"{method.names[0]}:{kind.__name__.removeprefix('Test')}": kind
    for method in methods()
    for kind in contracts(method)
}
BASE = "gguf:Q4"


def with_(name: str, base: str, **changes: object) -> tuple[str, type[QuantizationContract]]:
    return name, type(name, (FORMATS[base],), changes)


DEFAULT = (
    (BASE, FORMATS[BASE]),
    with_("gguf:Q4_0", BASE, ggml_type="Q4_0"),
    ("awq:Gemm, groups of 128", FORMATS["awq:Gemm"]),
    ("awq:Gemm, groups of 32", FORMATS["awq:GemmOfOtherGroups"]),
    with_("gptq:FourBits, groups of 128", "gptq:FourBits", group_size=128, block=128),
    ("gptq:FourBits, groups of 32", FORMATS["gptq:FourBits"]),
)


def product(kind: type[QuantizationContract]) -> tuple[Callable[[Tensor], None], int]:
    """Return what multiplies with all copies of a random matrix, and the bytes of one."""
    contract = kind()
    calls = []
    size = 0
    part = Part("model.part.weight", (0, ROWS))
    pieces, _ = contract.stored(
        part, torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)), "float32"
    )
    for _ in range(COPIES):
        setup = QuantizationSetup(contract.config, "float32", "cpu", KERNELS)
        weight = contract.method(setup).linear(LinearLayer("model.part", COLUMNS, ROWS, (part,)))
        assert weight is not None, kind
        load_pieces(weight, pieces)
        calls.append(weight.weight().bind())
        size = held_bytes(weight)

    def multiply(x: Tensor) -> None:
        for call in calls:
            call(x)

    return multiply, size


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in FORMATS]
    if unknown:
        sys.exit(f"unknown format {unknown[0]!r}; there are {', '.join(FORMATS)}")
    chosen = (
        [(BASE, FORMATS[BASE]), *((name, FORMATS[name]) for name in names)] if names else DEFAULT
    )
    products = {name: product(kind) for name, kind in chosen}
    times: dict[tuple[str, int], list[float]] = {
        (name, count): [] for name in products for count in TOKENS
    }
    for count in TOKENS:
        x = torch.randn(count, COLUMNS)
        for _ in range(ROUNDS):
            for name, (multiply, _) in products.items():
                started = time.perf_counter()
                multiply(x)
                times[name, count].append((time.perf_counter() - started) / COPIES * 1e3)
    for name, (_, size) in products.items():
        figures = []
        for count in TOKENS:
            ratio = statistics.median(
                a / b for a, b in zip(times[name, count], times[BASE, count], strict=True)
            )
            figures.append(
                f"{count} tokens {statistics.median(times[name, count]):.3f} ms ({ratio:.2f})"
            )
        print(f"{name:30} {size * 8 / ROWS / COLUMNS:.2f} bits  " + "  ".join(figures), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
