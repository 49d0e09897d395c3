"""Integer weights of compressed-tensors, which the tests write as the format defines them: bit by
bit, with numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pegboard_quantization_compressed_tensors.method import CompressedTensors
from pegboard_quantization_compressed_tensors.plugin import COMPRESSED_TENSORS
from torch import Tensor

from pegboard.errors import ModelError
from pegboard.interfaces.quantization import Part, QuantizationSetup
from pegboard.interfaces.weight_loader import WeightPiece
from pegboard.ops.blocks import BlockWeight
from pegboard_testing.contract_generic import check_entry, installed_entry
from pegboard_testing.contract_quantization import QuantizationContract, load_pieces, stored_pieces


def test_contract() -> None:
    check_entry(installed_entry("quantization", "compressed-tensors"))


def words(codes: np.ndarray, bits: int) -> Tensor:
    """Pack signed codes [n, m] along m: 2^(bits − 1) is added, and the bits follow each other in
    32-bit words."""
    n, m = codes.shape
    stream = np.zeros((n, -(-m * bits // 32) * 32), np.uint64)
    unsigned = (codes + 2 ** (bits - 1)).astype(np.uint64)
    for bit in range(bits):
        stream[:, bit : m * bits : bits] = unsigned >> np.uint64(bit) & np.uint64(1)
    packed = (stream.reshape(n, -1, 32) << np.arange(32, dtype=np.uint64)).sum(2).astype(np.uint32)
    return torch.from_numpy(packed.view(np.int32))


class TestPackedGroups(QuantizationContract):
    spec = COMPRESSED_TENSORS
    format = "pack-quantized"
    bits = 4
    strategy = "group"
    block = group_size = 32
    is_symmetric = True
    act_order = False
    scale_dtype = torch.bfloat16

    @property
    def config(self) -> dict[str, Any]:  # type: ignore[override]
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "strategy": self.strategy,
            "group_size": self.group_size if self.strategy == "group" else None,
            "symmetric": self.is_symmetric,
            "actorder": "group" if self.act_order else None,
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "config_groups": {"group_0": group},
        }

    def method(self, setup: QuantizationSetup) -> CompressedTensors:
        return CompressedTensors(None, setup)

    def stored(self, part: Part, values: Tensor, dtype: str) -> tuple[list[WeightPiece], Tensor]:
        rows, columns = values.shape
        rng = np.random.default_rng(abs(int(values[0, 0] * 1e6)))
        size = self.group_size if self.strategy == "group" else columns
        low = -(2 ** (self.bits - 1))
        high = 2 ** (self.bits - 1)
        shape = (1, 1) if self.strategy == "tensor" else (rows, columns // size)
        codes = rng.integers(low, high, (rows, columns))
        zeros = np.zeros(shape, np.int64) if self.is_symmetric else rng.integers(low, high, shape)
        scales = torch.from_numpy(rng.random(shape) * 0.1).to(self.scale_dtype)
        group = np.arange(columns) // size
        if self.act_order:  # merged parts see the same activations, so they have the same order
            group = np.random.default_rng(columns).permutation(group)
        true = (codes - zeros[:, group]).astype(np.float32) * scales.float().numpy()[:, group]
        tensors = self.tensors(codes, zeros, scales)
        if self.act_order:
            tensors["weight_g_idx"] = torch.from_numpy(group.astype(np.int32))
        pieces = stored_pieces(part.name.removesuffix(".weight"), tensors)
        return pieces, torch.from_numpy(true).to(getattr(torch, dtype)).float()

    def tensors(self, codes: np.ndarray, zeros: np.ndarray, scales: Tensor) -> dict[str, Tensor]:
        found = {
            "weight_packed": words(codes, self.bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(codes.shape),
        }
        if not self.is_symmetric:
            found["weight_zero_point"] = words(zeros.T, self.bits).T.contiguous()
        return found

    def test_weights_stay_packed(self) -> None:
        layer = self.layer((2,), self.block * 2)
        weight = self.linear(layer)
        self.fill(weight, layer, 1)
        assert (type(weight.weight()) is BlockWeight) == (self.block % 32 == 0)


class TestPackedGroupsWithZeros(TestPackedGroups):
    is_symmetric = False


class TestPackedGroupsInActOrder(TestPackedGroups):
    undivided = frozenset({"columns"})
    act_order = True


class TestPackedChannels(TestPackedGroups):
    strategy = "channel"


class TestPackedBytes(TestPackedGroups):
    undivided = frozenset({"columns"})
    bits = 8
    is_symmetric = False
    act_order = True


class TestPackedThreeBits(TestPackedGroups):
    bits = 3
    is_symmetric = False
    scale_dtype = torch.float16


class TestPackedSixBits(TestPackedGroups):
    bits = 6
    is_symmetric = False


class TestGroupsThatNoKernelTakes(TestPackedGroups):
    block = group_size = 8
    is_symmetric = False


class TestBytesPerChannel(TestPackedGroups):
    format = "int-quantized"
    bits = 8
    strategy = "channel"

    def tensors(self, codes: np.ndarray, zeros: np.ndarray, scales: Tensor) -> dict[str, Tensor]:
        found = {"weight": torch.from_numpy(codes.astype(np.int8)), "weight_scale": scales}
        if self.strategy == "tensor":
            found["weight_scale"] = scales.reshape(1)
        if not self.is_symmetric:
            found["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8)).reshape(
                found["weight_scale"].shape
            )
        return found


class TestBytesPerTensorWithZeros(TestBytesPerChannel):
    strategy = "tensor"
    is_symmetric = False
    scale_dtype = torch.float32


class TestFourBitsInBytes(TestBytesPerChannel):
    """w4a8"""

    format = "naive-quantized"
    bits = 4
    strategy = "group"


def broken(contract: TestPackedGroups, told: str, **changes: Tensor | None) -> None:
    """Load one weight in which these tensors are replaced, or missing (None)."""
    layer = contract.layer((1,), 64)
    weight = contract.linear(layer)
    pieces, _ = contract.stored(layer.parts[0], contract.values(0, 1, 64), "float32")
    tensors = {piece.name.rpartition(".")[2]: piece.data for piece in pieces} | changes
    changed = {name: data for name, data in tensors.items() if isinstance(data, Tensor)}
    with pytest.raises(ModelError, match=told):
        load_pieces(weight, stored_pieces("model.part0", changed))


def test_broken_tensors_are_refused_by_name() -> None:
    packed = TestPackedGroupsWithZeros()
    whole = TestFourBitsInBytes()
    broken(packed, "did not contain model.part0.weight_scale", weight_scale=None)
    broken(
        packed,
        "weight_packed has shape .1, 7.; model.merged expects .1, 8.",
        weight_packed=torch.zeros(1, 7, dtype=torch.int32),
    )
    broken(
        packed,
        "weight_zero_point has shape",
        weight_zero_point=torch.zeros(1, 1, dtype=torch.int32),
    )
    broken(
        packed,
        "weight_packed is stored as int64; this format needs int32",
        weight_packed=torch.zeros(1, 8, dtype=torch.int64),
    )
    broken(
        packed,
        "weight_scale is stored as int8; this format needs floats",
        weight_scale=torch.zeros(1, 2, dtype=torch.int8),
    )
    broken(packed, r"weight_shape does not say \(1, 64\)", weight_shape=torch.tensor([1, 63]))
    broken(
        whole,
        "model.part0.weight has integers that do not fit into 4 bits",
        weight=torch.full((1, 64), 9, dtype=torch.int8),
    )
    broken(
        whole,
        "model.part0.weight is stored as float32; this format needs int8",
        weight=torch.zeros(1, 64),
    )
