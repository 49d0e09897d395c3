"""Transforms of the inputs of linear layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pegboard_quantization_compressed_tensors.method import CompressedTensors
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import LinearLayer, Part, QuantizationSetup
from pegboard_testing.contract_quantization import load_pieces, stored_pieces
from pegboard_testing.fake_build import references
from pegboard_weights.composed import Transformed

EIGHT = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}}
COLUMNS = 64


def scheme(kind: str, *places: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": kind, "apply": list(places), "randomize": False, "requires_grad": False, **more}


def at(location: str, *targets: str, **more: Any) -> dict[str, Any]:
    return {
        "targets": list(targets or ("Linear",)),
        "location": location,
        "inverse": False,
        "ignore": [],
        **more,
    }


def method(**schemes: Any) -> CompressedTensors:
    config = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": EIGHT,
        "ignore": ["re:.*plain"],
    }
    config["transform_config"] = {"config_groups": schemes}
    return CompressedTensors(None, QuantizationSetup(config, "float32", "cpu", references()))


def product(
    found: CompressedTensors, module: str, x: Tensor, **tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what the layer computes for x, and its stored weight."""
    weight = found.linear(LinearLayer(module, COLUMNS, 8, (Part(f"{module}.weight", (0, 8)),)))
    assert weight is not None
    codes = torch.randint(-9, 9, (8, COLUMNS), dtype=torch.int8)
    stored = {"weight": codes, "weight_scale": torch.ones(8, 1)}
    if module.endswith("plain"):
        stored = {"weight": codes.float()}
    load_pieces(weight, stored_pieces(module, {**stored, **tensors}))
    return weight.bind(references())(x), codes.float()


def hadamard(size: int) -> Tensor:
    """With entries (−1)^(number of ones that the numbers of row and column share)."""
    return torch.tensor(
        [[(-1.0) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    )


@pytest.mark.parametrize("name", ["head_dim", "block_size"])
@pytest.mark.parametrize("module", ["a.down", "a.plain"])
def test_a_hadamard_matrix_needs_no_tensor(name: str, module: str) -> None:
    x = torch.randn(5, COLUMNS)
    whole = scheme("hadamard", at("input"), at("weight_input", inverse=True))
    found, stored = product(method(R4=whole), module, x)
    torch.testing.assert_close(found, x @ hadamard(COLUMNS) / 8 @ stored.T, atol=1e-3, rtol=1e-4)
    found, stored = product(method(R4={**whole, name: 16}), module, x)
    blocks = torch.block_diag(*[hadamard(16) / 4] * 4)
    torch.testing.assert_close(found, x @ blocks @ stored.T, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kind", ["random-hadamard", "random-matrix"])
@pytest.mark.parametrize("inverse", [False, True])
def test_random_matrices_are_stored(kind: str, inverse: bool) -> None:
    x = torch.randn(5, COLUMNS)
    matrix = torch.randn(16, 16)
    found = method(R4=scheme(kind, at("input", inverse=inverse), head_dim=16))
    y, stored = product(found, "a.down", x, **{"R4_input.weight": matrix})
    block = (matrix.T if inverse else matrix) / 4
    torch.testing.assert_close(
        y, x @ torch.block_diag(*[block] * 4) @ stored.T, atol=1e-3, rtol=1e-4
    )
    with pytest.raises(ModelError, match="did not contain a.down.R4_input.weight"):
        product(found, "a.down", x)


@pytest.mark.parametrize("inverse", [False, True])
def test_signs_of_a_hadamard_matrix(inverse: bool) -> None:
    """The layer gives what the stored matrix gives, and holds no matrix. A reload has new signs."""
    x = torch.randn(5, COLUMNS)
    found = method(R4=scheme("random-hadamard", at("input", inverse=inverse), head_dim=16))
    codes = torch.randint(-9, 9, (8, COLUMNS), dtype=torch.int8)
    weight = found.linear(LinearLayer("a.down", COLUMNS, 8, (Part("a.down.weight", (0, 8)),)))
    assert weight is not None
    for _ in range(2):
        matrix = (torch.randint(0, 2, (16, 1)) * 2.0 - 1) * hadamard(16)
        stored = {"weight": codes, "weight_scale": torch.ones(8, 1), "R4_input.weight": matrix}
        load_pieces(weight, stored_pieces("a.down", stored))
        block = torch.block_diag(*[(matrix.T if inverse else matrix) / 4] * 4)
        y = weight.bind(references())(x)
        torch.testing.assert_close(y, x @ block @ codes.float().T, atol=1e-3, rtol=1e-4)
        (span,) = weight.spans  # type: ignore[attr-defined]
        dense = Transformed(span.op, span.transform).dense()
        torch.testing.assert_close(dense, codes.float() @ block.T)
        assert [each.shape for each in span.transform.tensors()] == [(COLUMNS,)]


def test_targets_and_what_is_ignored() -> None:
    places = at("input", "re:.*down", ignore="re:.*9.down"), at("weight_output", "Linear")
    found = method(R4=scheme("hadamard", *places))
    x = torch.randn(2, COLUMNS)
    for module in ("a.9.down", "a.up"):
        y, stored = product(found, module, x)
        torch.testing.assert_close(y, x @ stored.T, atol=1e-3, rtol=1e-4)
    y, stored = product(found, "a.8.down", x)
    assert not torch.allclose(y, x @ stored.T, atol=1e-2)


@pytest.mark.parametrize(
    ("schemes", "told"),
    [
        ({"R": scheme("dct", at("input"))}, "R.type='dct'; compressed-tensors supports 'hadamard'"),
        (
            {"R": scheme("hadamard", at("output"))},
            "R.apply.location='output'; compressed-tensors supports 'input', 'weight_input'",
        ),
        ({"R": scheme("hadamard", at("k_cache"))}, "location='k_cache'"),
        ({"R": {"type": "hadamard"}}, "R.apply=None; compressed-tensors needs a list of objects"),
        (
            {"R": scheme("hadamard", at("input"), head_dim=0)},
            "R.head_dim=0; compressed-tensors needs a positive number",
        ),
        (
            {"R": scheme("hadamard", at("input"), head_dim=24)},
            "a.down has 64 columns; a.down.R_input.weight needs a multiple of 24",
        ),
        (
            {"R": scheme("hadamard", at("input"), head_dim=1.5)},
            "R.head_dim=1.5; compressed-tensors needs a positive number",
        ),
        (
            {"R": scheme("hadamard", at("input")), "S": scheme("hadamard", at("input"))},
            "input of a.down more than once: R, S",
        ),
    ],
)
def test_odd_transforms_are_refused(schemes: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        product(method(**schemes), "a.down", torch.randn(1, COLUMNS))
