"""The native kernels hold weights in as many bytes as checkpoints do. The formats are those of all
contract tests."""

from __future__ import annotations

import pytest
import torch
from pegboard_kernel_cpu.block_weight import NativeBlockWeight
from pegboard_kernel_cpu.code_weight import NativeCodeWeight

from pegboard.interfaces.quantization import LinearLayer, Part, QuantizationSetup
from pegboard.ops import REFERENCES
from pegboard_testing.authoring.formats_page import contracts, methods
from pegboard_testing.contract_quantization import QuantizationContract, load_pieces, tensor_index
from pegboard_testing.held_memory import held_bytes

KERNELS = {**REFERENCES, "block_weight": NativeBlockWeight, "code_weight": NativeCodeWeight}
LIMIT = 1.05
LARGER = {
    "a grid of vectors is held as its elements, of 3 bits": (1.43, "TestIQ3"),
    "a grid of vectors is held as its elements": (1.81, "TestIQ2"),
    "the option asks for floats": (4.0, "TestFloat"),
    "no kernel takes these groups": (
        7.2,
        "TestGemmOfGroupsThatNoKernelTakes",
        "TestGroupsThatNoKernelTakes",
        "TestGroupsOfRows",
    ),
    "floats of 6 bits are held as E4M3": (1.33, "TestMXFP6", "TestMXFP6WithThreeBitsOfMantissa"),
    "zeros of sparse weights are held": (
        3.6,
        "TestMarlin24",
        "TestMarlin24EightBitsPerChannel",
        "TestBitmask",
        "TestBitmask24OfFloat8",
        "TestBitmask24OfInt8",
    ),
    "zero points of 2 bits are held as bytes": (1.08, "TestTwoBits", "TestAutoRoundTwoBits"),
    "products of scales and zero points are held as float32": (
        1.21,
        "TestEightBits",
        "TestEightBitsInActOrder",
        "TestHQQ",
        "TestTwoBits",
    ),
    "float32 on this platform": (2.0, "TestPlainFromBfloat16"),
}
"""Why a weight takes more than the limit: how much more, and the contract tests."""

FORMATS = [
    contract for method in methods() for contract in contracts(method) if not contract.only_experts
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: f"{kind.__module__}-{kind.__name__}")
def test_a_weight_takes_the_bytes_of_the_checkpoint(kind: type[QuantizationContract]) -> None:
    contract = kind()
    rows = 128 * contract.row_block
    columns = contract.block * -(-512 // contract.block)
    part = Part("model.part.weight", (0, rows))
    weight = contract.method(QuantizationSetup(contract.config, "float32", "cpu", KERNELS)).linear(
        LinearLayer("model.part", columns, rows, (part,))
    )
    assert weight is not None
    pieces, _ = contract.stored(
        part, torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)), "float32"
    )
    index = tensor_index(pieces)
    stored = sum(index[wanted.name].num_bytes for wanted in weight.declare(index))
    load_pieces(weight, pieces)
    limit = max([LIMIT, *(limit for limit, *names in LARGER.values() if kind.__name__ in names)])
    assert held_bytes(weight) <= limit * stored


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: f"{kind.__module__}-{kind.__name__}")
def test_the_memory_is_named_and_a_reload_writes_it(kind: type[QuantizationContract]) -> None:
    """As the contract checks it for the references."""
    contract = kind()
    contract.make = lambda dtype="float32": contract.method(  # type: ignore[method-assign]
        QuantizationSetup(contract.config, dtype, "cpu", KERNELS)
    )
    contract.test_all_memory_that_grows_with_the_rows_is_named()
    contract.test_a_reload_writes_all_memory_that_is_named()
